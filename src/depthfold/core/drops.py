"""Drops: the convolutions and the residual branches that a plan leaves out."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from depthfold.core.span import Position, Span
from depthfold.errors import PlanError
from depthfold.support.coerce import as_whole


@dataclass(frozen=True, slots=True, order=True)
class Drops:
    """The `layers` that compute the identity instead, and the `branches` of residuals that compute zero.

    A branch is the span of its skip, given as a Span or as a pair (i, j). At its end, only the value of the skip is
    left. The layers of a dropped branch are not listed again.
    """

    layers: tuple[int, ...] = ()
    branches: tuple[Span, ...] = ()

    def __init__(self, layers: Iterable[int] = (), branches: Iterable[Span | tuple[Position, ...]] = ()) -> None:
        if not isinstance(layers, Iterable) or not isinstance(branches, Iterable):
            raise PlanError(
                "Expected a list of layers and a list of branches, as in Drops([3, 5], [(6, 9)]), found "
                f"{layers!r:.40} and {branches!r:.40}."
            )
        numbers = {as_whole("The number of a dropped layer", l, PlanError) for l in layers}
        object.__setattr__(self, "layers", tuple(sorted(numbers)))
        object.__setattr__(self, "branches", tuple(sorted({_require_span(branch) for branch in branches})))

    @classmethod
    def parse(cls, key: str) -> Drops:
        """Return the drops with this key. Raise PlanError if it is not one."""
        try:
            parts = [tuple(map(int, part.split(":"))) for part in key.split()]
            return cls([part[0] for part in parts if len(part) == 1], [part for part in parts if len(part) != 1])
        except ValueError:
            raise PlanError(
                f'Expected numbers of layers and ends of branches, as in "3 5 6:9", found {key!r:.80}.'
            ) from None

    @property
    def key(self) -> str:
        """The numbers of the layers and the ends of the branches, as in "3 5 6:9", for files and journals."""
        return " ".join((*map(str, self.layers), *(f"{branch.i}:{branch.j}" for branch in self.branches)))

    @property
    def missing(self) -> frozenset[int]:
        """All layers whose convolution is not computed."""
        return frozenset(self.layers).union(*(branch.layers for branch in self.branches))

    def within(self, span: Span) -> Drops:
        """Return the part inside a span."""
        if not self:
            return self
        inside = [branch for branch in self.branches if span.contains(branch)]
        return Drops([l for l in self.layers if span.i < l <= span.j], inside)

    def covers(self, span: Span) -> bool:
        """Return True if a span lies in a dropped branch, so that nothing of it is computed."""
        return any(branch.contains(span) for branch in self.branches)

    def kept(self, span: Span) -> tuple[int, ...]:
        """Return the layers of a span whose convolution is left."""
        missing = self.missing
        return tuple(l for l in span.layers if l not in missing)

    def left_alone(self, span: Span, residuals: Iterable[Span]) -> frozenset[Span]:
        """Return the residuals inside a span of which only the addition is left, because all its layers are dropped."""
        if self.kept(span):
            return frozenset()
        return frozenset(each for each in residuals if span.contains(each) and not self.covers(each))

    def __or__(self, other: Drops) -> Drops:
        return Drops((*self.layers, *other.layers), (*self.branches, *other.branches))

    def __bool__(self) -> bool:
        return bool(self.layers or self.branches)

    def __str__(self) -> str:
        parts = []
        if self.layers:
            parts.append(f"layer{'s' if len(self.layers) > 1 else ''} {', '.join(map(str, self.layers))}")
        if self.branches:
            parts.append(f"the branch{'es' if len(self.branches) > 1 else ''} {', '.join(map(str, self.branches))}")
        return " and ".join(parts) or "nothing"


def _require_span(branch: Any) -> Span:
    if isinstance(branch, Span):
        return branch
    try:
        i, j = branch
        return Span(operator.index(i), operator.index(j))
    except (TypeError, ValueError):
        raise PlanError(
            f"A dropped branch must be a span with 0 <= i < j, such as Span(3, 6), found {branch!r:.80}. Give a "
            "list of them: Drops([], [(3, 6)])."
        ) from None


NOTHING = Drops()
