"""Plans: the activations that stay and the positions where merging stops, with or without their predicted cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from depthfold.core.drops import NOTHING, Drops
from depthfold.core.shape import ConvShape
from depthfold.core.span import Position, Span
from depthfold.core.speedup import MeasuredSpeedup
from depthfold.errors import PlanError
from depthfold.support.coerce import as_tuple, as_whole
from depthfold.support.document import SPARSE, Document
from depthfold.support.table import Table
from depthfold.support.text import count

HEADER = ("layers", "becomes", "ms", "replaces ms", "saves ms")


@dataclass(frozen=True, slots=True)
class Plan(Document):
    """A and S of the paper: `activations` are the positions with an activation, and no merging crosses a cut.

    A is a subset of S, except that the last position L can have an activation and is never a cut. `dropped` are the
    convolutions and residual branches that are left out.
    """

    FORMAT: ClassVar[str] = "depthfold.plan"

    activations: frozenset[Position]
    cuts: tuple[Position, ...]
    dropped: Drops = field(default=NOTHING, metadata=SPARSE)

    def __init__(self, activations: Iterable[Position], cuts: Iterable[Position], dropped: Drops = NOTHING) -> None:
        if not isinstance(dropped, Drops):
            raise PlanError(
                f"The dropped layers and branches of a plan must be Drops, found {dropped!r:.80}. Use, for example, "
                "dropped=Drops(layers=[2])."
            )
        object.__setattr__(self, "dropped", dropped)
        object.__setattr__(self, "activations", frozenset(_positions("activations", activations)))
        object.__setattr__(self, "cuts", tuple(sorted(set(_positions("cuts", cuts)))))
        outside = sorted(self.activations - set(self.cuts))
        last = max(self.cuts, default=0)
        if len(outside) > 1 or (outside and outside[0] < last):
            raise PlanError(
                f"The activations {outside[:8]} are not among the cuts {list(self.cuts)[:60]}. Every activation except "
                "the one at the last position L must also be a cut: add them to cuts, or leave the activations out."
            )

    @property
    def digest_parts(self) -> tuple[object, ...]:
        """The parts of a digest that identifies the plan: A and S, and what is dropped only if there is something."""
        dropped = (self.dropped.key,) if self.dropped else ()
        return (sorted(self.activations), self.cuts, *dropped)

    def __str__(self) -> str:
        dropped = f"; drops {self.dropped}" if self.dropped else ""
        return f"Plan: activations at {ranges(self.activations)}; cuts at {ranges(self.cuts)}{dropped}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The layers between two cuts: one convolution in the compressed network.

    `times` are T[i, j, 0] and T[i, j, 1] in milliseconds, without and with an activation at the end. `replaced` is the
    time of its layers one by one, None if one of them was not timed. `shape` is the merged convolution, None if the
    solver was not given the network. `dropped` is what the plan drops inside the segment. If nothing is left of its
    layers, the shape is the identity, and the compressed network has no convolution there.
    """

    span: Span
    times: tuple[float, float]
    replaced: float | None = None
    shape: ConvShape | None = None
    dropped: Drops = field(default=NOTHING, metadata=SPARSE)

    @property
    def empty(self) -> bool:
        """True if all layers are dropped, so that there is no convolution."""
        return bool(self.dropped) and self.dropped.missing.issuperset(self.span.layers)

    def row(self, active: bool) -> tuple[str, ...]:
        """Return the segment as a row of text, with or without an activation at its end."""
        first, last = self.span.layers[0], self.span.layers[-1]
        layers = str(first) if first == last else f"{first}-{last}"
        becomes = str(self.shape) if self.shape else "as it is" if first == last else "one convolution"
        if self.dropped:
            left = "only an activation" if active else "nothing"
            becomes = f"{left}, all dropped" if self.empty else f"{becomes}, without {self.dropped}"
        time = self.times[active]
        replaced = "?" if self.replaced is None else f"{self.replaced:.4g}"
        # The solver rounds times up to picoseconds, 1e-9 ms, so that a layer alone may seem to save less than that.
        saved = "?" if self.replaced is None else f"{round(self.replaced - time, 8):.4g}"
        return (layers, becomes, f"{time:.4g}", replaced, saved)


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedPlan(Document):
    """A plan from a frontier with its predictions.

    `plan` holds A and S. `boundaries` is B, the boundaries between the blocks of the surrogate objective. `latency` is
    the sum of the segments' times in milliseconds, each rounded up to whole picoseconds. `latency_by_activations` is
    the latency if merging followed A instead of S (the ablation of Section 5.3). `fingerprint` is that of the network,
    empty if it was not known. `measured` are the end-to-end times with which choose() found that the plan meets its
    budget, and None in a frontier. Plans are compared without them, because they are not repeatable.
    """

    FORMAT: ClassVar[str] = "depthfold.solved-plan"

    plan: Plan
    boundaries: tuple[Position, ...]
    latency: float
    importance: float
    latency_by_activations: float
    segments: tuple[Segment, ...]
    original: float | None
    fingerprint: str = ""
    measured: MeasuredSpeedup | None = field(default=None, compare=False, metadata=SPARSE)

    def __post_init__(self) -> None:
        # A user may give it another plan, with dataclasses.replace() or in its JSON, and forget the rest.
        cuts, spans = list(self.plan.cuts), [segment.span for segment in self.segments]
        joined = [span.i for span in spans] == [0, *cuts] and [span.j for span in spans[:-1]] == cuts
        if not joined or any(each.dropped != self.plan.dropped.within(each.span) for each in self.segments):
            raise PlanError(
                "The segments of the solved plan do not fit its cuts and what it drops. To change it, make a Plan, and "
                "predict its latency with the latency table."
            )

    @property
    def speedup(self) -> float | None:
        """The original's latency divided by the plan's."""
        return self.original / self.latency if self.original and self.latency else None

    @property
    def convolutions(self) -> int:
        """The number of convolutions: one for each segment that is not empty."""
        return sum(not segment.empty for segment in self.segments)

    def __str__(self) -> str:
        return self._table().text()

    def __repr__(self) -> str:
        """Return one line: the segments would fill pages."""
        what = f"{count(self.convolutions, 'convolution')}, {self.latency:.4g} ms predicted"
        return f"<SolvedPlan {what}, importance {self.importance:.4g}; {self.plan}>"

    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> Table:
        rows = tuple(segment.row(segment.span.j in self.plan.activations) for segment in self.segments)
        return Table(tuple(self._lines()), HEADER, rows)

    def _lines(self) -> Iterator[str]:
        if found := self.measured:
            original = f"{found.share:.1%} of the original's {found.original_latency:.4g} ms"
            yield f"measured end to end: {found.latency:.4g} ms, {original} ({found})"
            if found.unreliable:
                yield f"unreliable: {found.unreliable}"
        share = ""
        if self.original and self.speedup:
            share = f", {self.latency / self.original:.1%} of the original's {self.original:.4g} ms"
            share += f" ({self.speedup:.2f}x as fast)"
        yield f"predicted: {self.latency:.4g} ms{share}; importance {self.importance:.4g}"
        yield f"{self.plan}; boundaries at {ranges(self.boundaries)}"
        convolutions = count(self.convolutions, "convolution")
        yield f"{convolutions}; {self.latency_by_activations:.4g} ms if merging followed A, not S"
        yield ""


def plan_of(plan: Plan | SolvedPlan) -> Plan:
    """Return the Plan of a SolvedPlan, or a Plan unchanged."""
    if isinstance(plan, SolvedPlan):
        return plan.plan
    if not isinstance(plan, Plan):
        raise PlanError(
            f"Expected a plan, found {type(plan).__name__}. Give a Plan(activations, cuts), or the plan that choose() "
            "or frontier.at() returns."
        )
    return plan


def _positions(name: str, given: Iterable[Position]) -> tuple[Position, ...]:
    positions = as_tuple(f"The {name} of a plan", given, PlanError)
    return tuple(as_whole(f"A position in the {name} of a plan", position, PlanError) for position in positions)


def ranges(positions: Iterable[int]) -> str:
    """Return the positions as text, for example 1-4 6 9-12."""
    runs: list[list[int]] = []
    for position in sorted(positions):
        if runs and runs[-1][1] == position - 1:
            runs[-1][1] = position
        else:
            runs.append([position, position])
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "none"
