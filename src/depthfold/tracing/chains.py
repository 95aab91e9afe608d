"""Chains: which drafts follow one another so that a span can hold both, and why a chain ends where it ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from depthfold.core import Refusal
from depthfold.tracing.branches import SkipDraft
from depthfold.tracing.drafts import Addition, Draft, Values
from depthfold.tracing.roles import Kind, owner
from depthfold.tracing.shapes import explain_pool


@dataclass(frozen=True, slots=True)
class Chains:
    """The drafts of every chain in order, and for each draft that ends a chain the reasons."""

    chains: tuple[tuple[Draft, ...], ...]
    endings: dict[Draft, tuple[Refusal, ...]]


def link_chains(drafts: list[Draft], values: Values) -> Chains:
    """Link drafts into chains.

    A skip holds only within one chain, and a value inside a chain may be read only by the next layer and by skips: so
    a skip that turns out not to fit becomes an ordinary addition, which may end further chains. Skips only ever
    disappear, so this comes to rest.
    """
    while True:
        projections = {step.conv for skip in _skips(drafts) for step in skip.steps}
        layers = [draft for draft in drafts if draft not in projections]
        following = _links(layers, values)
        broken = [
            (draft, addition)
            for draft in layers
            for addition in draft.additions
            if addition.skips and draft not in _run(addition.skips[0].first, following)
        ]
        if not broken:
            break
        for _, addition in broken:
            addition.skips = ()
    first = [draft for draft in layers if draft not in set(following.values())]
    chains = tuple(tuple(_run(draft, following)) for draft in first)
    return Chains(chains, {chain[-1]: tuple(_ending(chain[-1], layers, values)) for chain in chains})


def _skips(drafts: list[Draft]) -> Iterator[SkipDraft]:
    return (skip for draft in drafts for addition in draft.additions for skip in addition.skips)


def _run(draft: Draft, following: dict[Draft, Draft]) -> Iterator[Draft]:
    current: Draft | None = draft
    while current is not None:
        yield current
        current = following.get(current)


def _links(layers: list[Draft], values: Values) -> dict[Draft, Draft]:
    """The draft that follows each draft in its chain."""
    entry = {draft.pad or draft.conv: draft for draft in layers}
    for_skips = _skip_readers(layers)
    links: dict[Draft, Draft] = {}
    for draft in layers:
        if not all(addition.skips for addition in draft.additions):
            continue  # what is added here from elsewhere cannot be merged with what follows
        readers = set(values.readers(draft.tail))
        followers = [entry[reader] for reader in readers if reader in entry]
        rest = {reader for reader in readers if reader not in entry}
        if len(followers) == 1 and rest <= for_skips.get(draft.tail, set()):
            links[draft] = followers[0]
    return links


def _skip_readers(layers: list[Draft]) -> dict[fx.Node, set[fx.Node]]:
    """For each value the nodes that read it for a skip: an addition, or the first node of the projection."""
    readers: dict[fx.Node, set[fx.Node]] = {}
    for draft in layers:
        for addition in draft.additions:
            for skip in addition.skips:
                readers.setdefault(skip.source, set()).add(skip.reader(addition.node))
    return readers


def _ending(draft: Draft, layers: list[Draft], values: Values) -> Iterator[Refusal]:
    """Why nothing follows this draft in its chain."""
    for addition in draft.additions:
        if not addition.skips:
            yield _side_addition(addition, values)
    entry = {layer.pad or layer.conv for layer in layers}
    readers = list(dict.fromkeys(values.readers(draft.tail)))
    branches = [reader for reader in readers if reader in entry]
    if len(branches) > 1:
        names = ", ".join(owner(reader) for reader in branches[:4])
        yield Refusal(owner(draft.tail), "branches", f"{len(branches)} convolutions read this value: {names}")
    for reader in readers:
        role = values.roles[reader]
        if role.refusal is not None:
            yield explain_pool(role.refusal, reader, values.modules)
        elif reader not in entry:
            alone = role.kind is Kind.ACTIVATION and len(readers) == 1
            stray = _SECOND if alone else _STRAY.get(role.kind, ("branches", "it reads this value beside the layer"))
            yield Refusal(owner(reader), *stray)


_SECOND = ("second-activation", "it is the second activation in a row, and a layer has one")
_STRAY = {
    Kind.ADD: ("addition", "the value is also added elsewhere, where no span can hold the addition"),
    Kind.NORM: ("norm-alone", "this batch norm does not follow a convolution of its own"),
    Kind.ACTIVATION: ("activation-alone", "this activation reads a value that others read too"),
    Kind.PAD: ("padding", "this padding is not read by one convolution alone"),
}


def _side_addition(addition: Addition, values: Values) -> Refusal:
    source = owner(values.origin(addition.other))
    return Refusal(
        owner(addition.node),
        "side-addition",
        f"it adds {source}, which no span that ends here can hold: the addition stays, and nothing merges across it",
    )
