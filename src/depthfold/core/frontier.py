"""The frontier: the plans that are Pareto-optimal in latency and importance."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, Self, overload

from depthfold.core.budget import LARGEST, ROUNDING, Budget
from depthfold.core.drops import NOTHING, Drops
from depthfold.core.environment import Environment
from depthfold.core.plan import Plan, Segment, SolvedPlan
from depthfold.core.span import FlaggedSpan, Position, Span
from depthfold.core.surrogate import Surrogate
from depthfold.errors import BudgetError, InvalidValue
from depthfold.support.document import SPARSE, Document
from depthfold.support.optional import load
from depthfold.support.table import ROWS, Table
from depthfold.support.text import count, listed

HEADER = ("ms", "of original", "speed-up", "importance", "activations", "convolutions", "ms by A", "dropped layers")
SPANS = 5

_Segments = Mapping[tuple[Span, Drops], Segment]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One plan of a frontier, without the data that the plans share. See SolvedPlan."""

    latency: float
    importance: float
    latency_by_activations: float
    activations: tuple[Position, ...]
    cuts: tuple[Position, ...]
    boundaries: tuple[Position, ...]
    dropped: Drops = field(default=NOTHING, metadata=SPARSE)

    def spans(self, depth: int) -> tuple[Span, ...]:
        """Return the spans of the segments of a network with `depth` layers."""
        return tuple(Span(i, j) for i, j in pairwise((0, *self.cuts, depth)))

    def convolutions(self, depth: int) -> int:
        """Return the number of convolutions of a network with `depth` layers: segments that are not all dropped."""
        missing = self.dropped.missing
        return sum(not missing.issuperset(span.layers) for span in self.spans(depth))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Frontier(Document):
    """Every plan that is optimal for some budget, by rising latency and importance.

    Shares and speed-ups refer to `original`. `segments` has the times and the shape of every
    segment that a plan uses, once for each set of layers dropped in it. `fingerprint` is that of the network, empty if
    it was not known. `unscored` are the blocks that have a reason instead of a score in the importance table; no plan
    uses them. With a `surrogate`, importances are predicted scores, less its intercept. `quantity` is that of the
    importance table.
    """

    FORMAT: ClassVar[str] = "depthfold.frontier"
    FORMER: ClassVar[tuple[str, ...]] = ("normalisation", "lost")

    network: str
    fingerprint: str = ""
    depth: int
    environment: Environment
    original: float | None
    alpha: float | None
    surrogate: Surrogate | None = None
    segments: tuple[Segment, ...]
    points: tuple[Point, ...]
    unscored: tuple[FlaggedSpan, ...] = ()
    quantity: str = field(default="", metadata=SPARSE)

    def __post_init__(self) -> None:
        for name in ("points", "segments", "unscored"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
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
        # super() without arguments does not work in a dataclass with slots.
        frontier = super(Frontier, cls).from_json(data)
        for _ in frontier:  # raises if a plan lacks a segment
            pass
        return frontier

    @property
    def plans(self) -> tuple[SolvedPlan, ...]:
        return tuple(self)

    def at(self, budget: Budget | str) -> SolvedPlan:
        """Return the best plan whose latency is at most the budget."""
        budget = Budget.parse(budget)
        limit = budget.limit(self.original)
        found = bisect_right(self.points, limit, key=lambda point: point.latency)
        if not found:
            fastest, in_ms = self.points[0].latency, "" if budget.kind == "milliseconds" else f" ({limit:.4g} ms)"
            raise BudgetError(
                f"No plan meets the budget {budget}{in_ms}: the fastest plan takes "
                f"{fastest!r} ms{self._share(fastest)}. Ask for that or more."
            )
        return self[found - 1]

    def plot(self) -> Any:
        """Return a plotly figure: the importance of every plan over its latency, and the latency of the original.

        A notebook displays it; elsewhere use figure.show() or figure.write_html(path).
        """
        plotly, header = load("plotly.graph_objects", "plot"), self._header
        figure = plotly.Figure()
        figure.add_scatter(
            x=[point.latency for point in self.points],
            y=[point.importance for point in self.points],
            text=["<br>".join(map(": ".join, zip(header, row, strict=True))) for row in self._rows(self.points)],
            hoverinfo="text",
            mode="lines+markers",
        )
        figure.update_layout(
            title=f"Frontier of {self.network or 'an unnamed network'}: {count(len(self), 'plan')}",
            xaxis_title="Predicted latency, ms",
            yaxis_title=self.importance_meaning,
        )
        if self.original:
            label = f"original, {self.original:.4g} ms"
            figure.add_vline(
                x=self.original, line_dash="dash", annotation_text=label, annotation_position="bottom left"
            )
        return figure

    @property
    def importance_meaning(self) -> str:
        """The meaning of a plan's importance, for the axis of a plot: a normalised one is not a change of a score."""
        quantity = self.quantity or "the score"
        if self.surrogate is not None:
            return f"Importance: prediction of {quantity}, less {self.surrogate.intercept:.4g}"
        normalised = "" if self.alpha is None else f", normalised with alpha = {self.alpha:g}"
        return f"Importance: predicted change of {quantity}{normalised}"

    def __len__(self) -> int:
        return len(self.points)

    @overload
    def __getitem__(self, index: int) -> SolvedPlan: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[SolvedPlan, ...]: ...

    def __getitem__(self, index: int | slice) -> SolvedPlan | tuple[SolvedPlan, ...]:
        known = self._known()
        if isinstance(index, slice):
            return tuple(self._solved(point, known) for point in self.points[index])
        return self._solved(self.points[index], known)

    def __iter__(self) -> Iterator[SolvedPlan]:
        known = self._known()
        return (self._solved(point, known) for point in self.points)

    def __str__(self) -> str:
        return self._table().text()

    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> Table:
        shown = min(ROWS, len(self))
        rows = self._rows(self.points[n * (len(self) - 1) // max(shown - 1, 1)] for n in range(shown))
        title = f"Frontier of {self.network or 'an unnamed network'}: {count(len(self), 'plan')}, exact"
        title += f"; {shown} of them:" if shown < len(self) else ""
        return Table((title, *self._notes(), ""), self._header, rows, left_out=len(self) - shown)

    def __repr__(self) -> str:
        fastest, best = self.points[0].latency, self.points[-1].latency
        what = f"{count(len(self), 'plan')}, {fastest:.4g} to {best:.4g} ms, exact"
        return f"<Frontier {self.network or '(unnamed)'}: {what}>"

    def _notes(self) -> Iterator[str]:
        yield f"environment: {self.environment}"
        if self.surrogate is not None:
            yield f"surrogate: {self.surrogate}"
        if self.unscored:
            named = listed(self.unscored, SPANS, separator="; ")
            yield f"{count(len(self.unscored), 'block')} without a score, used by no plan: {named}"

    @property
    def _header(self) -> tuple[str, ...]:
        return HEADER if any(point.dropped for point in self.points) else HEADER[:-1]

    def _rows(self, points: Iterable[Point]) -> tuple[tuple[str, ...], ...]:
        """Return plans as rows of text, with the columns of the header."""
        columns = len(self._header)
        return tuple(self._row(point)[:columns] for point in points)

    def _row(self, point: Point) -> tuple[str, ...]:
        share = speedup = "?"
        if self.original and point.latency:
            share, speedup = f"{point.latency / self.original:.1%}", f"{self.original / point.latency:.2f}x"
        return (
            f"{point.latency:.4g}", share, speedup, f"{point.importance:.4g}", str(len(point.activations)),
            str(point.convolutions(self.depth)), f"{point.latency_by_activations:.4g}", str(len(point.dropped.missing)),
        )  # fmt: skip

    def _share(self, latency: float) -> str:
        """Return the latency in per cent, rounded up so that a budget of it admits the plan; empty if too large."""
        if not self.original or latency > LARGEST["share"] * self.original:
            return ""
        tenths = max(math.ceil(1000 * latency / self.original * (1 - ROUNDING)), 1)
        return f" ({tenths / 10:.1f}% of the original)"

    def _known(self) -> _Segments:
        return {(segment.span, segment.dropped): segment for segment in self.segments}

    def _solved(self, point: Point, known: _Segments) -> SolvedPlan:
        keys = [(span, point.dropped.within(span)) for span in point.spans(self.depth)]
        if lacking := [key for key in keys if key not in known]:
            span, dropped = lacking[0]
            raise InvalidValue(
                f"The plan with the cuts {list(point.cuts)[:60]} needs the segment {span}"
                f"{f' without {dropped}' if dropped else ''}, which the frontier lacks. Was its file edited? Solve "
                "again."
            )
        return SolvedPlan(
            plan=Plan(point.activations, point.cuts, point.dropped), boundaries=point.boundaries,
            latency=point.latency, importance=point.importance, latency_by_activations=point.latency_by_activations,
            segments=tuple(known[key] for key in keys), original=self.original, fingerprint=self.fingerprint,
        )  # fmt: skip
