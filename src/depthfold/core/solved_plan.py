"""A plan that knows what it costs, what it is worth, and what each of its segments replaces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from depthfold.core.network import text_table
from depthfold.core.plan import Plan, ranges
from depthfold.core.shape import ConvShape
from depthfold.core.span import Position, Span
from depthfold.errors import PlanError
from depthfold.support.coerce import as_tuple_of
from depthfold.support.text import count

HEADER = ("layers", "becomes", "ms", "replaces ms", "saves ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The layers between two cuts: one convolution in the compressed network.

    `time` is what it takes with an activation at its end, `bare` without one, None if that is the same.
    `replaced` is the time of its layers one by one, None where one of them was never timed; `shape` is the merged
    convolution, None where the solver was not given the network.
    """

    span: Span
    time: float
    bare: float | None = None
    replaced: float | None = None
    shape: ConvShape | None = None

    def takes(self, active: bool) -> float:
        """Its time in a plan that has an activation at its end, or has none."""
        return self.time if active or self.bare is None else self.bare

    def row(self, active: bool) -> tuple[str, ...]:
        first, last = self.span.layers[0], self.span.layers[-1]
        layers = str(first) if first == last else f"{first}-{last}"
        becomes = str(self.shape) if self.shape else "as it is" if first == last else "one convolution"
        replaced = "?" if self.replaced is None else f"{self.replaced:.4g}"
        time = self.takes(active)
        saved = "?" if self.replaced is None else f"{self.replaced - time:.4g}"
        return (layers, becomes, f"{time:.4g}", replaced, saved)


@dataclass(frozen=True, slots=True, init=False)
class SolvedPlan(Plan):
    """A plan from a frontier: A (`activations`), S (`cuts`) and B (`boundaries`, where the blocks of the surrogate
    objective part), with its predictions. It is a Plan, so it can be rewritten and merged as it is.

    `latency` is the sum of its segments in milliseconds, each with its activation or without, rounded up to a float:
    the exact sum is never more than it says. `latency_by_activations` is the latency if merging followed A instead of
    S (the ablation of Section 5.3), rounded up in the same way. `fingerprint` is that of the network, empty where it
    was not known.
    """

    FORMAT: ClassVar[str] = "depthfold.solved-plan"

    boundaries: tuple[Position, ...]
    latency: float
    importance: float
    latency_by_activations: float
    segments: tuple[Segment, ...]
    original: float | None
    fingerprint: str = ""

    def __init__(
        self,
        *,
        activations: Iterable[Position],
        cuts: Iterable[Position],
        boundaries: Iterable[Position],
        latency: float,
        importance: float,
        latency_by_activations: float,
        segments: Iterable[Segment],
        original: float | None,
        fingerprint: str = "",
    ) -> None:
        Plan.__init__(self, activations, cuts)  # by name: a slotted dataclass is a copy that super() does not know
        object.__setattr__(self, "boundaries", tuple(sorted(boundaries)))
        object.__setattr__(self, "latency", latency)
        object.__setattr__(self, "importance", importance)
        object.__setattr__(self, "latency_by_activations", latency_by_activations)
        object.__setattr__(self, "segments", as_tuple_of(Segment, "The segments of a plan", segments, PlanError))
        object.__setattr__(self, "original", original)
        object.__setattr__(self, "fingerprint", fingerprint)
        if not self.segments:
            raise PlanError("The plan has no segments; expected one for the layers between each two of its cuts.")
        ends = (0, *self.cuts, self.segments[-1].span.j)
        if outside := sorted(self.activations - {*self.boundaries, ends[-1]}):
            raise PlanError(f"The activations {outside[:8]} are no boundaries of the plan: A must lie within B.")
        if [(segment.span.i, segment.span.j) for segment in self.segments] != list(pairwise(ends)):
            raise PlanError(
                f"The segments of the plan do not start and end at its cuts {list(self.cuts)[:60]}: they are "
                f"{', '.join(str(segment.span) for segment in self.segments[:60])}."
            )

    @property
    def plan(self) -> Plan:
        """A and S alone."""
        return Plan(activations=self.activations, cuts=self.cuts)

    @property
    def speedup(self) -> float | None:
        """How many times as fast as the original the plan is predicted to be."""
        return self.original / self.latency if self.original and self.latency else None

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        share = ""
        if self.original and self.speedup:
            share = f", {self.latency / self.original:.1%} of the original's {self.original:.4g} ms"
            share += f" ({self.speedup:.2f} times as fast)"
        yield f"{self.latency:.4g} ms{share}; importance {self.importance:.4g}"
        yield f"{Plan.__str__(self)}; boundaries at {ranges(self.boundaries)}"
        convolutions = count(len(self.segments), "convolution")
        yield f"{convolutions}; {self.latency_by_activations:.4g} ms if merging followed A, not S"
        yield ""
        rows = [segment.row(segment.span.j in self.activations) for segment in self.segments]
        yield from text_table(HEADER, rows)
