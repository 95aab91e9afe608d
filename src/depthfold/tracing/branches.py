"""Linear branches: how an operand of an addition comes from an earlier value through linear operations alone.

The operand may be a sum itself, however its additions are nested: every term of it is a branch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING

from torch import fx

from depthfold.core import ConvShape
from depthfold.tracing.roles import Kind
from depthfold.tracing.shapes import average_pool, conv_shape

if TYPE_CHECKING:
    from depthfold.tracing.drafts import Draft, Values


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """One linear operation: a convolution (`conv`, then it is a draft, too), an average pool (`pool`, and the number
    that it divides by), or neither. A batch norm may follow each of them."""

    shape: ConvShape
    conv: Draft | None = None
    pool: fx.Node | None = None
    divisor: int = 1
    norm: fx.Node | None = None

    @property
    def entry(self) -> fx.Node | None:
        """The node that reads the input of the step."""
        return (self.conv.pad or self.conv.conv) if self.conv else self.pool or self.norm


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SkipDraft:
    """A branch from `source`, the input value of the draft `first`, to an addition: the steps in their order, none for
    the identity. `operand` is what is added. `sums` are the additions inside the operand that the branch runs
    through, the one that reads the branch last."""

    source: fx.Node
    first: Draft
    steps: tuple[Step, ...]
    operand: fx.Node
    sums: tuple[fx.Node, ...]

    @property
    def projection(self) -> ConvShape | None:
        """All steps as one convolution, None for the identity."""
        return reduce(ConvShape.then, (step.shape for step in self.steps)) if self.steps else None

    def reader(self, addition: fx.Node) -> fx.Node:
        """The node that reads the source, if the whole operand is added by this addition."""
        entry = self.steps[0].entry if self.steps else None
        return entry or (self.sums[-1] if self.sums else addition)


@dataclass(frozen=True, slots=True)
class _Term:
    """A branch while it is followed back: the source, and the nodes of its operations, the last one first."""

    source: fx.Node
    nodes: tuple[fx.Node, ...]
    operand: fx.Node
    sums: tuple[fx.Node, ...]


def linear_branches(
    operand: fx.Node, path: Sequence[Draft], values: Values, ends: Mapping[fx.Node, Draft]
) -> tuple[SkipDraft, ...]:
    """The branches whose sum the operand is, if all start at the input of the same draft on the path; () if not.

    `ends` holds drafts by the last node before their additions. The path lists its drafts last first.
    """
    sources = {draft.source: draft for draft in reversed(path)}
    terms = list(_terms(operand, (), sources, values, ends))
    if None in terms or len({term.source for term in terms if term}) != 1:
        return ()
    found = []
    for term in filter(None, terms):
        first = sources[term.source]
        steps = _steps(term, conv_shape(first, values.modules), values, ends)
        convolutions = [step.conv for step in steps or () if step.conv]
        # Beside a longer path, several convolutions in a row are a chain of their own, which may be merged by itself.
        if steps is None or set(convolutions) & set(path) or (len(convolutions) > 1 and first is not path[0]):
            return ()
        found.append(SkipDraft(source=term.source, first=first, steps=steps, operand=term.operand, sums=term.sums))
    return tuple(found)


def _terms(
    operand: fx.Node,
    sums: tuple[fx.Node, ...],
    sources: Mapping[fx.Node, Draft],
    values: Values,
    ends: Mapping[fx.Node, Draft],
) -> Iterator[_Term | None]:
    """The terms of the operand, each followed back to the first of these sources; None for what is not linear."""
    nodes: list[fx.Node] = []
    node = values.origin(operand)
    while node not in sources:
        if not values.only_reader(node):
            yield None
            return
        if values.roles[node].kind is Kind.ADD:
            one, two = node.all_input_nodes if len(node.all_input_nodes) == 2 else (node, node)
            # A batch norm after a sum would add its bias to every term.
            if nodes or values.origin(one) is values.origin(two):
                yield None
                return
            for each in (one, two):
                yield from _terms(each, (*sums, node), sources, values, ends)
            return
        before = _before(node, values, ends)
        if before is None:
            yield None
            return
        nodes.append(node)
        node = before
    yield _Term(node, tuple(nodes), operand, sums)


def _before(node: fx.Node, values: Values, ends: Mapping[fx.Node, Draft]) -> fx.Node | None:
    """The value that a linear operation reads; None if the node ends no linear operation."""
    role, draft = values.roles[node], ends.get(node)
    if role.detail is not None:  # a batch norm with an activation inside
        return None
    if draft is not None:
        return draft.source
    pools = role.refusal is not None and role.refusal.code == "pooling"
    if role.kind is Kind.NORM or (pools and average_pool(node, values.modules)):
        return values.origin(node.all_input_nodes[0])
    return None


def _steps(term: _Term, first: ConvShape, values: Values, ends: Mapping[fx.Node, Draft]) -> tuple[Step, ...] | None:
    """The operations of a term in their order, or None where they are not one convolution: zeros that are put around
    a value in the middle are not the padding of a merged layer, because of the bias before them."""
    steps: list[Step] = []
    channels = first.in_channels
    for node in reversed(term.nodes):
        if draft := ends.get(node):
            step = Step(shape=conv_shape(draft, values.modules), conv=draft, norm=draft.norm)
        elif pool := average_pool(node, values.modules):
            if pool.deviation or len(pool.kernel) != first.dims:
                return None
            step = Step(shape=pool.shape(channels), pool=node, divisor=pool.divisor)
        elif steps and steps[-1].norm is None:
            steps[-1] = replace(steps[-1], norm=node)
            continue
        else:
            step = Step(shape=ConvShape.identity(channels, first.dims), norm=node)
        if steps and any(width for pair in step.shape.padding for width in pair):
            return None
        steps.append(step)
        channels = step.shape.out_channels
    return tuple(steps)
