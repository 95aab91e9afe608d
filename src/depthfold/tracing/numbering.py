"""Number the drafts of all chains: the layers, skips, barriers and refusals of a Network, and their nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import fx

from depthfold.core import Layer, Network, Refusal, Skip
from depthfold.tracing.chains import Chains
from depthfold.tracing.drafts import Addition, DataFlow, Draft, Step
from depthfold.tracing.roles import Kind, Sizes, display_name
from depthfold.tracing.shapes import conv_shape
from depthfold.tracing.size_guard import SizeGuard
from depthfold.tracing.traced import LayerSite, SkipSite, StepSite


def number(
    name: str, chains: Chains, flow: DataFlow, sizes: Sizes
) -> tuple[Network, tuple[LayerSite, ...], tuple[SkipSite, ...]]:
    """Number all layers, chain by chain, with a barrier between two chains. Return the network and its nodes."""
    drafts = [draft for chain in chains.chains for draft in chain]
    position = {draft: l for l, draft in enumerate(drafts, start=1)}
    ends = [position[chain[-1]] for chain in chains.chains]
    skip_sites = tuple(_skip_sites(drafts, position, flow))
    network = Network(
        name=name,
        layers=tuple(_layer(draft, flow, sizes) for draft in drafts),
        skips=tuple(site.skip for site in skip_sites),
        barriers=tuple(ends[:-1]),
        refusals=tuple(_refusals(chains, position, flow)),
    )
    return network, tuple(_site(draft, flow, sizes) for draft in drafts), skip_sites


def _layer(draft: Draft, flow: DataFlow, sizes: Sizes) -> Layer:
    return Layer(
        where=display_name(draft.conv),
        shape=conv_shape(draft.conv, draft.pad, flow.modules),
        in_size=tuple(sizes[draft.source][2:]),
        out_size=tuple(sizes[draft.conv][2:]),
        norm=next((display_name(node) for node in draft.affine if flow.roles[node].kind is Kind.NORM), None),
        activation=flow.roles[draft.activation].detail if draft.activation else None,
    )


def _site(draft: Draft, flow: DataFlow, sizes: Sizes) -> LayerSite:
    return LayerSite(
        pad=draft.pad.name if draft.pad else None,
        conv=draft.conv.name,
        affine=tuple(node.name for node in draft.affine),
        linear=draft.linear.name,
        additions=tuple(addition.node.name for addition in draft.additions),
        activation=draft.activation.name if draft.activation else None,
        out=draft.tail.name,
        batch=sizes[draft.source][0],
        guards=tuple(_guards(draft, flow)),
    )


def _guards(draft: Draft, flow: DataFlow) -> Iterator[str]:
    """Yield the size guards between a layer and the value that it reads."""
    node = (draft.pad or draft.conv).all_input_nodes[0]
    while node is not draft.source:
        if node.op == "call_module" and isinstance(flow.modules[str(node.target)], SizeGuard):
            yield node.name
        node = node.all_input_nodes[0]


def _skip_sites(drafts: list[Draft], position: dict[Draft, int], flow: DataFlow) -> Iterator[SkipSite]:
    for draft in drafts:
        for addition in draft.additions:
            for skip in addition.skips:
                yield SkipSite(
                    skip=Skip(
                        source=position[skip.first] - 1,
                        target=position[draft],
                        where=display_name(addition.node),
                        projection=skip.projection,
                        side=_adds_another_value_before(draft, addition),
                    ),
                    add=addition.node.name,
                    operand=skip.operand.name,
                    sums=tuple(node.name for node in skip.sums),
                    steps=tuple(_step_site(step, flow) for step in skip.steps),
                )


def _adds_another_value_before(draft: Draft, addition: Addition) -> bool:
    """Return True if a value that is not a skip is added to a layer before this addition."""
    return not all(earlier.skips for earlier in draft.additions[: draft.additions.index(addition)])


def _step_site(step: Step, flow: DataFlow) -> StepSite:
    return StepSite(
        shape=step.shape,
        pad=step.conv.pad.name if step.conv and step.conv.pad else None,
        conv=step.conv.conv.name if step.conv else None,
        pool=step.pool.name if step.pool else None,
        divisor=step.divisor,
        affine=tuple(node.name for node in step.affine),
        guards=tuple(_guards(step.conv, flow)) if step.conv else (),
    )


def _refusals(chains: Chains, position: dict[Draft, int], flow: DataFlow) -> Iterator[Refusal]:
    """Yield the reasons why chains end, then the reasons why other convolutions and norms are not part of a layer."""
    reported: set[str] = set()
    last = max(position.values(), default=0)
    for draft, reasons in chains.endings.items():
        for refusal in dict.fromkeys(reasons):
            reported.add(refusal.where)
            yield replace(refusal, position=position[draft]) if position[draft] < last else refusal
    for node, role in flow.roles.items():
        if role.refusal and role.refusal.where not in reported and _looks_mergeable(node, flow):
            reported.add(role.refusal.where)
            yield role.refusal


def _looks_mergeable(node: fx.Node, flow: DataFlow) -> bool:
    """Return True if a user would expect this to be part of a layer: it is or contains a convolution or a norm."""
    if node.op != "call_module":
        refusal = flow.roles[node].refusal
        return refusal is not None and refusal.code == "computed-weights"
    inside = flow.modules[str(node.target)].modules()
    return flow.roles[node].kind is Kind.OTHER and any(
        "Conv" in type(m).__name__ or "BatchNorm" in type(m).__name__ for m in inside
    )
