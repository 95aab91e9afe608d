"""Chains of drafts, numbered: the layers, skips, barriers and refusals of a Network, and where they live."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import fx

from depthfold.core import Layer, Refusal, Skip
from depthfold.tracing.branches import Step
from depthfold.tracing.chains import Chains
from depthfold.tracing.drafts import Draft, Values
from depthfold.tracing.roles import Kind, Sizes, owner
from depthfold.tracing.shapes import conv_shape
from depthfold.tracing.size_guard import SizeGuard
from depthfold.tracing.traced import LayerSite, SkipSite, StepSite


@dataclass(frozen=True, slots=True)
class Numbered:
    layers: tuple[Layer, ...]
    sites: tuple[LayerSite, ...]
    skip_sites: tuple[SkipSite, ...]
    barriers: tuple[int, ...]
    refusals: tuple[Refusal, ...]


def number(chains: Chains, values: Values, sizes: Sizes) -> Numbered:
    drafts = [draft for chain in chains.chains for draft in chain]
    position = {draft: l for l, draft in enumerate(drafts, start=1)}
    ends = [position[chain[-1]] for chain in chains.chains]
    return Numbered(
        layers=tuple(_layer(draft, values, sizes) for draft in drafts),
        sites=tuple(_site(draft, values, sizes) for draft in drafts),
        skip_sites=tuple(_skip_sites(drafts, position, values)),
        barriers=tuple(ends[:-1]),
        refusals=tuple(_refusals(chains, position, values)),
    )


def _layer(draft: Draft, values: Values, sizes: Sizes) -> Layer:
    return Layer(
        where=owner(draft.conv),
        shape=conv_shape(draft, values.modules),
        in_size=tuple(sizes[draft.source][2:]),
        out_size=tuple(sizes[draft.conv][2:]),
        norm=owner(draft.norm) if draft.norm else None,
        activation=values.roles[draft.activation].detail if draft.activation else None,
    )


def _site(draft: Draft, values: Values, sizes: Sizes) -> LayerSite:
    return LayerSite(
        pad=draft.pad.name if draft.pad else None,
        conv=draft.conv.name,
        norm=draft.norm.name if draft.norm else None,
        linear=draft.linear.name,
        additions=tuple(addition.node.name for addition in draft.additions),
        activation=draft.activation.name if draft.activation else None,
        out=draft.tail.name,
        batch=sizes[draft.source][0],
        guards=tuple(_guards(draft, values)),
    )


def _guards(draft: Draft, values: Values) -> Iterator[str]:
    """Yield the guards between the value that a layer reads and the layer."""
    node = (draft.pad or draft.conv).all_input_nodes[0]
    while node is not draft.source:
        if node.op == "call_module" and isinstance(values.modules[str(node.target)], SizeGuard):
            yield node.name
        node = node.all_input_nodes[0]


def _skip_sites(drafts: list[Draft], position: dict[Draft, int], values: Values) -> Iterator[SkipSite]:
    for draft in drafts:
        for addition in draft.additions:
            for skip in addition.skips:
                yield SkipSite(
                    skip=Skip(
                        source=position[skip.first] - 1,
                        target=position[draft],
                        where=owner(addition.node),
                        projection=skip.projection,
                    ),
                    add=addition.node.name,
                    operand=skip.operand.name,
                    sums=tuple(node.name for node in skip.sums),
                    steps=tuple(_step_site(step, values) for step in skip.steps),
                )


def _step_site(step: Step, values: Values) -> StepSite:
    return StepSite(
        shape=step.shape,
        pad=step.conv.pad.name if step.conv and step.conv.pad else None,
        conv=step.conv.conv.name if step.conv else None,
        pool=step.pool.name if step.pool else None,
        divisor=step.divisor,
        norm=step.norm.name if step.norm else None,
        guards=tuple(_guards(step.conv, values)) if step.conv else (),
    )


def _refusals(chains: Chains, position: dict[Draft, int], values: Values) -> Iterator[Refusal]:
    """Why chains end, each at its barrier; then every other convolution and batch norm that is no part of a layer."""
    seen: set[str] = set()
    last = max(position.values(), default=0)
    for draft, reasons in chains.endings.items():
        for refusal in dict.fromkeys(reasons):
            seen.add(refusal.where)
            yield replace(refusal, position=position[draft]) if position[draft] < last else refusal
    for node, role in values.roles.items():
        if role.refusal and role.refusal.where not in seen and _would_merge(node, values):
            seen.add(role.refusal.where)
            yield role.refusal


def _would_merge(node: fx.Node, values: Values) -> bool:
    """Whether a user would expect this to be part of a layer: a convolution, a norm, or something with such inside."""
    if node.op != "call_module":
        refusal = values.roles[node].refusal
        return refusal is not None and refusal.code == "computed-weights"
    inside = values.modules[str(node.target)].modules()
    return values.roles[node].kind is Kind.OTHER and any(
        "Conv" in type(m).__name__ or "BatchNorm" in type(m).__name__ for m in inside
    )
