"""Layers in the making: every convolution takes in the norm, the additions and the activation that follow it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from depthfold.tracing.roles import Kind, Role


@dataclass(slots=True, eq=False)
class Addition:
    """An addition that a draft takes in: `main` is the operand that the draft computes, `other` the rest.

    `skip` is set where the other operand comes from a value on the draft's own path, as it is or through a projection.
    """

    node: fx.Node
    main: fx.Node
    other: fx.Node
    skip: SkipDraft | None = None


@dataclass(slots=True, eq=False)
class SkipDraft:
    """A skip from `source`, the input value of the draft `first`. A projection is a draft of its own (then no layer),
    or a batch norm alone."""

    source: fx.Node
    first: Draft
    projection: Draft | None = None
    norm: fx.Node | None = None


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
            by_tail[node] = draft
        elif role.kind is Kind.NORM and (found := open_draft(node.all_input_nodes[0])):
            if found.norm is None and not found.additions:
                found.norm = node
                found.activation = node if role.detail else None
                extend(found, node)
        elif role.kind is Kind.ACTIVATION and (found := open_draft(node.all_input_nodes[0])):
            found.activation = node
            extend(found, node)
        elif role.kind is Kind.ADD and (addition := _addition(node, values, by_tail, open_draft)):
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
    node: fx.Node, values: Values, by_tail: Mapping[fx.Node, Draft], open_draft: OpenDraft
) -> tuple[Draft, Addition] | None:
    """Which draft takes in this addition, and whether the other operand is a skip of its own.

    Of two drafts that could, the one wins that makes a skip of the other (ResNet's branch over its downsample); of two
    such, the one that reaches further, because the taps of a skip must lie within the kernel of the branch.
    """
    one, two = node.args
    assert isinstance(one, fx.Node) and isinstance(two, fx.Node)
    candidates: list[tuple[tuple[bool, int, int, int], Draft, Addition]] = []
    for main, other in ((one, two), (two, one)):
        if draft := open_draft(main):
            path = _path(draft, by_tail)
            skip = _skip(other, path, values, open_draft)
            if skip and skip.source in values.changing:
                skip = None
            steps = path.index(skip.first) + 1 if skip else 0
            rank = (skip is not None, steps, _reach(values.modules[str(draft.conv.target)]), values.order[draft.conv])
            candidates.append((rank, draft, Addition(node, main, other, skip)))
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


def _skip(other: fx.Node, path: list[Draft], values: Values, open_draft: OpenDraft) -> SkipDraft | None:
    """How the other operand comes from the input of one of the drafts on the path, if it does."""
    origin = values.origin(other)

    def reading(value: fx.Node) -> Draft | None:
        return next((draft for draft in path if draft.source is value), None)

    if first := reading(origin):
        return SkipDraft(origin, first)
    projection = open_draft(other)
    if projection and projection not in path and not projection.additions and (first := reading(projection.source)):
        return SkipDraft(projection.source, first, projection=projection)
    role = values.roles[origin]
    if role.kind is Kind.NORM and role.detail is None and values.only_reader(origin):
        source = values.origin(origin.all_input_nodes[0])
        if first := reading(source):
            return SkipDraft(source, first, norm=origin)
    return None


def _reach(conv: Any) -> int:
    """How far the convolution reaches: its kernel, dilation included, over all dimensions."""
    return sum((k - 1) * d for k, d in zip(conv.kernel_size, conv.dilation, strict=True))
