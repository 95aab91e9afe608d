"""Assemble layers: each convolution takes the norms, factors, additions and the activation that follow it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import fx

from depthfold.tracing.branches import linear_branches
from depthfold.tracing.drafts import Addition, DataFlow, Draft, SkipDraft
from depthfold.tracing.roles import AFFINE, Kind
from depthfold.tracing.shapes import conv_shape, skip_fits


def draft_layers(flow: DataFlow) -> list[Draft]:
    """Return all drafts in the order of the graph."""
    drafts: list[Draft] = []
    by_tail: dict[fx.Node, Draft] = {}
    ends: dict[fx.Node, Draft] = {}  # by the last node before the additions

    def open_draft(node: fx.Node) -> Draft | None:
        """Return the draft that ends at this node, if it has no activation and nothing else reads it."""
        draft = by_tail.get(flow.origin(node))
        return draft if draft and draft.activation is None and flow.has_one_reader(draft.tail) else None

    def extend(draft: Draft, node: fx.Node) -> None:
        del by_tail[draft.tail]
        draft.tail = node
        by_tail[node] = draft

    for node, role in flow.roles.items():
        if role.kind is Kind.CONVOLUTION:
            draft = _start(node, flow)
            drafts.append(draft)
            by_tail[node] = ends[node] = draft
        elif role.kind in AFFINE and (found := open_draft(node.all_input_nodes[0])):
            if not found.additions:
                ends[node] = ends.pop(found.linear)
                found.affine.append(node)
                found.activation = node if role.detail else None
                extend(found, node)
        elif role.kind is Kind.ACTIVATION and (found := open_draft(node.all_input_nodes[0])):
            found.activation = node
            extend(found, node)
        elif role.kind is Kind.ADD and (match := _assign_addition(node, flow, by_tail, ends, open_draft)):
            draft, addition = match
            draft.additions.append(addition)
            extend(draft, node)
    return drafts


def _start(conv: fx.Node, flow: DataFlow) -> Draft:
    operand = conv.all_input_nodes[0]
    pads = flow.roles[operand].kind is Kind.PAD and flow.has_one_reader(operand)
    source = flow.origin(operand.all_input_nodes[0] if pads else operand)
    return Draft(conv=conv, pad=operand if pads else None, source=source, tail=conv)


def _assign_addition(
    node: fx.Node,
    flow: DataFlow,
    by_tail: Mapping[fx.Node, Draft],
    ends: Mapping[fx.Node, Draft],
    open_draft: Callable[[fx.Node], Draft | None],
) -> tuple[Draft, Addition] | None:
    """Return the draft that takes this addition, and the addition with its skips; None if no draft can take it.

    None can take one that writes to a value which is read under another name, or one that doubles a value.
    If both operands end a draft, choose by these criteria, in this order: the other operand is a skip (the branch of a
    ResNet block, not its downsample); the draft is a single layer with a kernel larger than 1x1, because parallel
    linear branches are one layer and a 1x1 convolution parallel to a longer path is a projection; the longer path; the
    larger kernel, because the taps of a skip must lie within the kernel of its branch.
    """
    one, two = node.args
    assert isinstance(one, fx.Node) and isinstance(two, fx.Node)
    if node in flow.overwritten or flow.origin(one) is flow.origin(two):
        return None
    candidates: list[tuple[tuple[bool, bool, int, int, int], Draft, Addition]] = []
    for main, other in ((one, two), (two, one)):
        if draft := open_draft(main):
            skips, length = _skips(other, _path(draft, by_tail), flow, ends)
            shape = conv_shape(draft.conv, draft.pad, flow.modules)
            single = length == 1 and max(shape.kernel) > 1
            rank = (bool(skips), single, length, sum(shape.extent), flow.order[draft.conv])
            candidates.append((rank, draft, Addition(node, main, other, skips)))
    if not candidates:
        return None
    _, draft, addition = max(candidates, key=lambda candidate: candidate[0])
    return draft, addition


def _path(draft: Draft, by_tail: Mapping[fx.Node, Draft]) -> list[Draft]:
    """Return the draft and the drafts that lead to it, last one first."""
    path = [draft]
    while (before := by_tail.get(path[-1].source)) is not None:
        path.append(before)
    return path


def _skips(
    other: fx.Node, path: list[Draft], flow: DataFlow, ends: Mapping[fx.Node, Draft]
) -> tuple[tuple[SkipDraft, ...], int]:
    """Return the branches whose sum is the other operand, and the number of drafts on the path parallel to them.

    Return ((), 0) if their taps lie outside the kernel of the path, or if the value at their start is overwritten.
    """
    skips = linear_branches(other, path, flow, ends)
    if not skips or skips[0].source in flow.overwritten:
        return (), 0
    length = path.index(skips[0].first) + 1
    spanned = [conv_shape(draft.conv, draft.pad, flow.modules) for draft in reversed(path[:length])]
    if not all(skip_fits(spanned, skip.projection) for skip in skips):
        return (), 0
    return skips, length
