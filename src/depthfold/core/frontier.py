"""The frontier: the plans that no other plan beats in both latency and importance."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from numbers import Integral
from typing import Any, ClassVar, Self

from depthfold.core.budget import LARGEST_SHARE, Budget
from depthfold.core.environment import Environment
from depthfold.core.network import text_table
from depthfold.core.solved_plan import Segment, SolvedPlan
from depthfold.core.span import FlaggedSpan, Position
from depthfold.errors import BudgetError, InvalidValue
from depthfold.support.coerce import as_tuple_of
from depthfold.support.document import Document
from depthfold.support.text import at_most, count, share_at_least

HEADER = ("ms", "of original", "speed-up", "importance", "activations", "convolutions", "ms by A")
SHOWN = 20
SPANS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One plan of a frontier without the details that it shares with the others. See SolvedPlan."""

    latency: float
    importance: float
    latency_by_activations: float
    activations: tuple[Position, ...]
    cuts: tuple[Position, ...]
    boundaries: tuple[Position, ...]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Frontier(Document):
    """Every plan that is optimal for some budget, the fastest first; later plans are slower and better.

    `original` is the latency that shares and speed-ups refer to. `lost` is 0 for an exact frontier, one that is
    complete up to the rounding of its sums (docs/solver.md says how little that is); where the solver had to thin its
    labels, no budget's plan is further than `lost` below the best importance possible.
    `segments` has the time and the shape of every segment that a plan of the frontier uses. `fingerprint` is that of
    the network, empty where it was not known. `unscored` are the blocks that have a reason instead of a score in the
    importance table: no plan uses them.
    """

    FORMAT: ClassVar[str] = "depthfold.frontier"

    network: str
    fingerprint: str = ""
    depth: int
    environment: Environment
    original: float | None
    alpha: float | None
    normalisation: str | None
    lost: float
    segments: tuple[Segment, ...]
    points: tuple[Point, ...]
    unscored: tuple[FlaggedSpan, ...] = ()

    def __post_init__(self) -> None:
        for name, kind in (("points", Point), ("segments", Segment), ("unscored", FlaggedSpan)):
            items = as_tuple_of(kind, f"The {name} of a frontier", getattr(self, name), InvalidValue)
            object.__setattr__(self, name, items)
        if not self.points:
            raise InvalidValue("A frontier has at least one plan.")
        for one, two in pairwise(self.points):
            if not (one.latency < two.latency and one.importance < two.importance):
                raise InvalidValue(
                    f"The plans of a frontier rise in latency and importance, found {one.latency:g} ms with "
                    f"{one.importance:g} before {two.latency:g} ms with {two.importance:g}."
                )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        # By name: a slotted dataclass is a copy that super() does not know.
        frontier = super(Frontier, cls).from_json(data)
        for _ in frontier:  # a document may have been edited: every plan must find its segments
            pass
        return frontier

    @property
    def plans(self) -> tuple[SolvedPlan, ...]:
        return tuple(self)

    @property
    def exact(self) -> bool:
        return self.lost == 0

    def at(self, budget: Budget | str | float) -> SolvedPlan:
        """The best plan that takes no longer than the budget; among equals the faster one."""
        budget = Budget.parse(budget)
        limit = budget.limit(self.original)
        # A latency is the exact sum rounded up, and the limit is exact: no plan slips past its budget.
        found = bisect_right(self.points, limit, key=lambda point: Fraction(point.latency))
        if not found:
            raise BudgetError(
                f"No plan meets the budget {budget}{_in_ms(budget, float(limit))}: the fastest plan takes "
                f"{self.points[0].latency!r} ms{self._share(self.points[0].latency)}. Ask for that or more."
            )
        return self[found - 1]

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> SolvedPlan:
        if not isinstance(index, Integral):
            raise InvalidValue(
                f"A frontier is asked for one plan at a time, frontier[0] or frontier[-1]; found {index!r}. For "
                "several at once ask frontier.plans."
            )
        return self._solved(self.points[index], self._by_span())

    def __iter__(self) -> Iterator[SolvedPlan]:
        by_span = self._by_span()
        return (self._solved(point, by_span) for point in self.points)

    def __str__(self) -> str:
        shown = min(SHOWN, len(self))
        rows = [self._row(self.points[n * (len(self) - 1) // max(shown - 1, 1)]) for n in range(shown)]
        how = "exact" if self.exact else f"thinned: at most {at_most(self.lost)} of importance lost at any budget"
        title = f"Frontier of {self.network or 'an unnamed network'}: {count(len(self), 'plan')}, {how}"
        title += f"; {shown} of them:" if shown < len(self) else ""
        return "\n".join([title, *self._notes(), "", *text_table(HEADER, rows)])

    def __repr__(self) -> str:
        fastest, best = self.points[0].latency, self.points[-1].latency
        what = f"{count(len(self), 'plan')}, {fastest:.4g} to {best:.4g} ms, {'exact' if self.exact else 'thinned'}"
        return f"<Frontier {self.network or '(unnamed)'}: {what}>"

    def _notes(self) -> Iterator[str]:
        yield f"environment: {self.environment}"
        if self.unscored:
            more = f" and {len(self.unscored) - SPANS} more" if len(self.unscored) > SPANS else ""
            named = "; ".join(map(str, self.unscored[:SPANS]))
            yield f"{count(len(self.unscored), 'block')} without a score, used by no plan: {named}{more}"

    def _row(self, point: Point) -> tuple[str, ...]:
        share = speedup = "?"
        if self.original and point.latency:
            share, speedup = f"{point.latency / self.original:.1%}", f"{self.original / point.latency:.2f}x"
        counts = str(len(point.activations)), str(len(point.cuts) + 1)
        return (
            f"{point.latency:.4g}", share, speedup, f"{point.importance:.4g}", *counts,
            f"{point.latency_by_activations:.4g}",
        )  # fmt: skip

    def _share(self, latency: float) -> str:
        """For a person to ask for, so it is rounded up, and left out where a budget would not take it."""
        if not self.original or Fraction(latency) > LARGEST_SHARE * Fraction(self.original):
            return ""
        return f" ({share_at_least(latency, self.original)} of the original)"

    def _by_span(self) -> Mapping[tuple[Position, Position], Segment]:
        return {(segment.span.i, segment.span.j): segment for segment in self.segments}

    def _solved(self, point: Point, by_span: Mapping[tuple[Position, Position], Segment]) -> SolvedPlan:
        ends = list(pairwise((0, *point.cuts, self.depth)))
        if lacking := [pair for pair in ends if pair not in by_span]:
            raise InvalidValue(
                f"The plan with the cuts {list(point.cuts)[:60]} needs the segment ({lacking[0][0]}, {lacking[0][1]}], "
                "which is not among the segments of the frontier. Was its document edited? Solve again."
            )
        return SolvedPlan(
            activations=point.activations,
            cuts=point.cuts,
            boundaries=point.boundaries,
            latency=point.latency,
            importance=point.importance,
            latency_by_activations=point.latency_by_activations,
            segments=tuple(by_span[pair] for pair in ends),
            original=self.original,
            fingerprint=self.fingerprint,
        )


def _in_ms(budget: Budget, limit: float) -> str:
    return "" if budget.kind == "milliseconds" else f" ({limit:.4g} ms)"
