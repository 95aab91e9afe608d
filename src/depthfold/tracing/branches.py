"""Find the linear branches in an operand of an addition.

The operand may itself be a sum of several branches, with its additions nested in any way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from depthfold.core import ConvShape
from depthfold.tracing.drafts import DataFlow, Draft, SkipDraft, Step
from depthfold.tracing.roles import AFFINE, Kind
from depthfold.tracing.shapes import average_pool, conv_shape


@dataclass(frozen=True, slots=True)
class _Term:
    """One branch of an operand: its source and its operations, last one first."""

    source: fx.Node
    nodes: tuple[fx.Node, ...]
    operand: fx.Node
    sums: tuple[fx.Node, ...]


def linear_branches(
    operand: fx.Node, path: Sequence[Draft], flow: DataFlow, ends: Mapping[fx.Node, Draft]
) -> tuple[SkipDraft, ...]:
    """Return the branches whose sum is the operand, if all of them start at the input of the same draft on the path.

    Return () otherwise. `path` lists drafts from the last to the first. `ends` maps the last node before the additions
    of a draft to the draft.
    """
    sources = {draft.source: draft for draft in reversed(path)}
    terms = _terms(operand, (), sources, flow, ends)
    if len({term.source for term in terms}) != 1:
        return ()
    branches = []
    for term in terms:
        first = sources[term.source]
        steps = _steps(term, conv_shape(first.conv, first.pad, flow.modules), flow, ends)
        convolutions = [step.conv for step in steps or () if step.conv]
        # Several convolutions in a row, parallel to a longer path, form a separate chain that can be merged on its own.
        if steps is None or set(convolutions) & set(path) or (len(convolutions) > 1 and first is not path[0]):
            return ()
        branches.append(SkipDraft(source=term.source, first=first, steps=steps, operand=term.operand, sums=term.sums))
    return tuple(branches)


def _terms(
    operand: fx.Node,
    sums: tuple[fx.Node, ...],
    sources: Mapping[fx.Node, Draft],
    flow: DataFlow,
    ends: Mapping[fx.Node, Draft],
) -> list[_Term]:
    """Follow each term of the operand back to the first of these sources. Return [] if a term is not linear."""
    nodes: list[fx.Node] = []
    node = flow.origin(operand)
    while node not in sources:
        if not flow.has_one_reader(node):
            return []
        if flow.roles[node].kind is Kind.ADD:
            one, two = node.all_input_nodes if len(node.all_input_nodes) == 2 else (node, node)
            # A batch norm after a sum would add its bias to every term.
            if nodes or flow.origin(one) is flow.origin(two):
                return []
            first, second = (_terms(term, (*sums, node), sources, flow, ends) for term in (one, two))
            return first + second if first and second else []
        before = _input_of_linear(node, flow, ends)
        if before is None:
            return []
        nodes.append(node)
        node = before
    return [_Term(node, tuple(nodes), operand, sums)]


def _input_of_linear(node: fx.Node, flow: DataFlow, ends: Mapping[fx.Node, Draft]) -> fx.Node | None:
    """Return the value that a linear operation reads, or None if no linear operation ends at this node."""
    role, draft = flow.roles[node], ends.get(node)
    if role.detail is not None:  # a batch norm with an activation inside
        return None
    if draft is not None:
        return draft.source
    pools = role.refusal is not None and role.refusal.code == "pooling"
    if role.kind in AFFINE or (pools and average_pool(node, flow.modules)):
        return flow.origin(node.all_input_nodes[0])
    return None


def _steps(term: _Term, first: ConvShape, flow: DataFlow, ends: Mapping[fx.Node, Draft]) -> tuple[Step, ...] | None:
    """Return the operations of a term in order, or None if they cannot be written as one convolution.

    Only the first step may pad: a later padding adds zeros after a bias, which a merged layer cannot do.
    """
    steps: list[Step] = []
    channels = first.in_channels
    for node in reversed(term.nodes):
        if draft := ends.get(node):
            step = Step(shape=conv_shape(draft.conv, draft.pad, flow.modules), conv=draft, affine=tuple(draft.affine))
        elif pool := average_pool(node, flow.modules):
            if pool.deviation or len(pool.kernel) != first.dims:
                return None
            step = Step(shape=pool.shape(channels), pool=node, divisor=pool.divisor)
        elif steps:
            steps[-1] = replace(steps[-1], affine=(*steps[-1].affine, node))
            continue
        else:
            step = Step(shape=ConvShape.identity(channels, first.dims), affine=(node,))
        if steps and any(width for pair in step.shape.padding for width in pair):
            return None
        steps.append(step)
        channels = step.shape.out_channels
    return tuple(steps)
