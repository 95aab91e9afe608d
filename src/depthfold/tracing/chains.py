"""Link drafts into chains of layers that spans can contain, and explain where a chain ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from depthfold.core import Refusal
from depthfold.tracing.drafts import Addition, DataFlow, Draft, SkipDraft
from depthfold.tracing.roles import Kind, display_name
from depthfold.tracing.rules import Reason
from depthfold.tracing.shapes import explain_pool


@dataclass(frozen=True, slots=True)
class Chains:
    """The drafts of every chain in order, and the reasons why each chain ends, by its last draft."""

    chains: tuple[tuple[Draft, ...], ...]
    endings: dict[Draft, tuple[Refusal, ...]]


def link_chains(drafts: list[Draft], flow: DataFlow) -> Chains:
    """Link drafts into chains.

    A skip must lie within one chain, and a value inside a chain may be read only by the next layer and by skips. A skip
    that does not fit becomes an ordinary addition, which may end further chains, so link again until all skips fit.
    This terminates because skips are only removed.
    """
    while True:
        projections = {step.conv for skip in _skips(drafts) for step in skip.steps}
        layers = [draft for draft in drafts if draft not in projections]
        following = _links(layers, flow)
        broken = [
            (draft, addition)
            for draft in layers
            for addition in draft.additions
            if addition.skips and draft not in _chain_from(addition.skips[0].first, following)
        ]
        if not broken:
            break
        for _, addition in broken:
            addition.skips = ()
    first = [draft for draft in layers if draft not in set(following.values())]
    chains = tuple(tuple(_chain_from(draft, following)) for draft in first)
    return Chains(chains, {chain[-1]: tuple(_reasons(chain[-1], layers, flow)) for chain in chains})


def _skips(drafts: list[Draft]) -> Iterator[SkipDraft]:
    return (skip for draft in drafts for addition in draft.additions for skip in addition.skips)


def _chain_from(draft: Draft, following: dict[Draft, Draft]) -> Iterator[Draft]:
    current: Draft | None = draft
    while current is not None:
        yield current
        current = following.get(current)


def _links(layers: list[Draft], flow: DataFlow) -> dict[Draft, Draft]:
    """Return the draft that follows each draft in its chain."""
    entry = {draft.pad or draft.conv: draft for draft in layers}
    for_skips = _skip_readers(layers)
    links: dict[Draft, Draft] = {}
    for draft in layers:
        if not all(addition.skips for addition in draft.additions):
            continue  # the value added here cannot be merged into the next layer
        readers = set(flow.readers(draft.tail))
        followers = [entry[reader] for reader in readers if reader in entry]
        rest = {reader for reader in readers if reader not in entry}
        if len(followers) == 1 and rest <= for_skips.get(draft.tail, set()):
            links[draft] = followers[0]
    return links


def _skip_readers(layers: list[Draft]) -> dict[fx.Node, set[fx.Node]]:
    """Return the nodes that read each value for a skip: an addition, or the first node of the projection."""
    readers: dict[fx.Node, set[fx.Node]] = {}
    for draft in layers:
        for addition in draft.additions:
            for skip in addition.skips:
                readers.setdefault(skip.source, set()).add(skip.reader(addition.node))
    return readers


def _reasons(draft: Draft, layers: list[Draft], flow: DataFlow) -> Iterator[Refusal]:
    """Yield the reasons why no draft follows this one in its chain."""
    for addition in draft.additions:
        if not addition.skips:
            yield _side_addition(addition, flow)
    entry = {layer.pad or layer.conv for layer in layers}
    readers = list(dict.fromkeys(flow.readers(draft.tail)))
    branches = [reader for reader in readers if reader in entry]
    if len(branches) > 1:
        names = ", ".join(display_name(reader) for reader in branches[:4])
        yield Refusal(display_name(draft.tail), "branches", f"{len(branches)} convolutions read this value: {names}")
    for reader in readers:
        role = flow.roles[reader]
        if role.refusal is not None:
            yield explain_pool(role.refusal, reader, flow.modules)
        elif reader not in entry:
            alone = role.kind is Kind.ACTIVATION and len(readers) == 1
            default = ("branches", "it reads this value in addition to the next layer")
            reason = _SECOND if alone else _OTHER_READERS.get(role.kind, default)
            if role.kind is Kind.ADD:
                reason = _addition(reader, flow)
            yield Refusal(display_name(reader), *reason)


_SECOND = ("second-activation", "it is the second activation in a row, and a layer can have only one")
_OTHER_READERS = {
    Kind.NORM: ("norm-alone", "this batch norm does not directly follow a convolution"),
    Kind.FACTOR: (
        "multiplication",
        "it multiplies by a number, which is merged only if it alone reads a convolution or its batch norm",
    ),
    Kind.ACTIVATION: ("activation-alone", "this activation reads a value that other operations also read"),
    Kind.PAD: ("padding", "this padding is read by something other than a single convolution"),
}


def _addition(node: fx.Node, flow: DataFlow) -> Reason:
    """Return the reason why this addition is not part of a layer."""
    if node in flow.overwritten:
        return "alias", "it writes in place to a value that is also read under another name"
    branch = max(map(flow.origin, node.all_input_nodes), key=flow.order.__getitem__)  # the other one may be its input
    if (activation := flow.roles[branch].detail) is not None:
        return "addition", f"an activation ({activation}) comes before this addition, and only x + conv(x) is a skip"
    return "addition", "the value is also added elsewhere, and no span can contain that addition"


def _side_addition(addition: Addition, flow: DataFlow) -> Refusal:
    source = display_name(flow.origin(addition.other))
    return Refusal(
        display_name(addition.node),
        "side-addition",
        f"it adds {source}, which no span that ends here can contain, so nothing merges across this addition",
    )
