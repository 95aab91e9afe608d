"""Layers in the making: every convolution takes in the norm, the additions and the activation that follow it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from depthfold.tracing.branches import SkipDraft, linear_branches
from depthfold.tracing.roles import Kind, Role
from depthfold.tracing.shapes import conv_shape, skip_fits


@dataclass(slots=True, eq=False)
class Addition:
    """An addition that a draft takes in: `main` is the operand that the draft computes, `other` the rest.

    `skips` are the branches whose sum the other operand is, where they come from a value on the draft's own path, as it
    is or through a projection. Empty where the operand is anything else.
    """

    node: fx.Node
    main: fx.Node
    other: fx.Node
    skips: tuple[SkipDraft, ...] = ()


@dataclass(slots=True, eq=False)
class Draft:
    """One convolution and what follows it. `tail` is the last node taken in: the value of the layer's position."""

    conv: fx.Node
    pad: fx.Node | None
    source: fx.Node
    tail: fx.Node
    norm: fx.Node | None = None
    activation: fx.Node | None = None
    additions: list[Addition] = field(default_factory=list)

    @property
    def linear(self) -> fx.Node:
        """The node before the additions."""
        return self.norm or self.conv


OpenDraft = Callable[[fx.Node], Draft | None]


class Values:
    """Who reads what, seen through operations that do nothing. `changing` are the values that are written to while
    others can read them: no skip can start there."""

    def __init__(
        self, roles: Mapping[fx.Node, Role], modules: Mapping[str, Any], changing: frozenset[fx.Node] = frozenset()
    ) -> None:
        self.roles = roles
        self.modules = modules
        self.changing = changing
        self.order = {node: n for n, node in enumerate(roles)}

    def origin(self, node: fx.Node) -> fx.Node:
        while self.roles[node].kind is Kind.NOTHING:
            node = node.all_input_nodes[0]
        return node

    def readers(self, node: fx.Node) -> Iterator[fx.Node]:
        for user in node.users:
            if self.roles[user].kind is Kind.NOTHING:
                yield from self.readers(user)
            else:
                yield user

    def only_reader(self, node: fx.Node) -> bool:
        return len(set(self.readers(node))) == 1


def draft_layers(values: Values) -> list[Draft]:
    """All drafts, in the order of the graph."""
    drafts: list[Draft] = []
    by_tail: dict[fx.Node, Draft] = {}
    ends: dict[fx.Node, Draft] = {}  # by the last node before the additions

    def open_draft(node: fx.Node) -> Draft | None:
        """The draft whose linear end this is, if nothing else reads it."""
        draft = by_tail.get(values.origin(node))
        return draft if draft and draft.activation is None and values.only_reader(draft.tail) else None

    def extend(draft: Draft, node: fx.Node) -> None:
        del by_tail[draft.tail]
        draft.tail = node
        by_tail[node] = draft

    for node, role in values.roles.items():
        if role.kind is Kind.CONVOLUTION:
            draft = _start(node, values)
            drafts.append(draft)
            by_tail[node] = ends[node] = draft
        elif role.kind is Kind.NORM and (found := open_draft(node.all_input_nodes[0])):
            if found.norm is None and not found.additions:
                found.norm = node
                ends[node] = ends.pop(found.conv)
                found.activation = node if role.detail else None
                extend(found, node)
        elif role.kind is Kind.ACTIVATION and (found := open_draft(node.all_input_nodes[0])):
            found.activation = node
            extend(found, node)
        elif role.kind is Kind.ADD and (addition := _addition(node, values, by_tail, ends, open_draft)):
            draft, taken = addition
            draft.additions.append(taken)
            extend(draft, node)
    return drafts


def _start(conv: fx.Node, values: Values) -> Draft:
    given = conv.all_input_nodes[0]
    pads = values.roles[given].kind is Kind.PAD and values.only_reader(given)
    source = values.origin(given.all_input_nodes[0] if pads else given)
    return Draft(conv=conv, pad=given if pads else None, source=source, tail=conv)


def _addition(
    node: fx.Node,
    values: Values,
    by_tail: Mapping[fx.Node, Draft],
    ends: Mapping[fx.Node, Draft],
    open_draft: OpenDraft,
) -> tuple[Draft, Addition] | None:
    """Which draft takes in this addition, and whether the other operand is a skip of its own.

    Of two drafts that could, the one wins that makes a skip of the other (ResNet's branch over its downsample). Of two
    such, a single layer wins, since parallel linear branches are one layer, but a 1x1 convolution beside a longer path
    is a projection; then the longer path; then the one that reaches further, because the taps of a skip must lie within
    the kernel of the branch.
    """
    one, two = node.args
    assert isinstance(one, fx.Node) and isinstance(two, fx.Node)
    candidates: list[tuple[tuple[bool, bool, int, int, int], Draft, Addition]] = []
    for main, other in ((one, two), (two, one)):
        if draft := open_draft(main):
            skips, steps = _skips(other, _path(draft, by_tail), values, ends)
            shape = conv_shape(draft, values.modules)
            alone = steps == 1 and max(shape.kernel) > 1
            rank = (bool(skips), alone, steps, sum(shape.extent), values.order[draft.conv])
            candidates.append((rank, draft, Addition(node, main, other, skips)))
    if not candidates:
        return None
    _, draft, addition = max(candidates, key=lambda candidate: candidate[0])
    return draft, addition


def _path(draft: Draft, by_tail: Mapping[fx.Node, Draft]) -> list[Draft]:
    """The draft and the drafts that lead to it, last first."""
    path = [draft]
    while (before := by_tail.get(path[-1].source)) is not None:
        path.append(before)
    return path


def _skips(
    other: fx.Node, path: list[Draft], values: Values, ends: Mapping[fx.Node, Draft]
) -> tuple[tuple[SkipDraft, ...], int]:
    """The branches whose sum the other operand is, and how many drafts of the path they span. None where the taps of
    one lie outside the kernel of the path, or where the value that they start at changes."""
    skips = linear_branches(other, path, values, ends)
    if not skips or skips[0].source in values.changing:
        return (), 0
    steps = path.index(skips[0].first) + 1
    spanned = [conv_shape(draft, values.modules) for draft in reversed(path[:steps])]
    if not all(skip_fits(spanned, skip.projection) for skip in skips):
        return (), 0
    return skips, steps
