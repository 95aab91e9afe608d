"""The data that the templates and the figures show, taken from the findings.

This is the only file of the package that reads the entries of the latency table and the times of segments.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

from depthfold.core import (
    NOTHING,
    BlockOption,
    ConvShape,
    Drops,
    FlaggedSpan,
    Frontier,
    Network,
    Point,
    Segment,
    SolvedPlan,
    Span,
)
from depthfold.core.options import left_of
from depthfold.reporting import format
from depthfold.reporting.findings import Findings

MOST_PLANS = 300  # positions that a slider of a few hundred pixels can resolve
MOST_PLACES = 40  # places that are listed for one reason
MOST_ROWS = 1500  # entries of a table that are all listed
FLAGS = {
    (True, True): "an activation at both ends",
    (True, False): "an activation at the start only",
    (False, True): "an activation at the end only",
    (False, False): "no activation at either end",
}
Key = TypeVar("Key")
_Floored = Mapping[tuple[Span, ConvShape | None], tuple[bool, bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownPlans:
    """The plans on the page, the fastest first.

    `chosen` is the index of the chosen plan in `points`. `best` is that of the most important plan that merges or
    drops layers and is faster than the original. `of` is the number of plans on the frontier, and `on_frontier` is
    False if the chosen plan was added to them.
    """

    points: tuple[Point, ...]
    chosen: int
    best: int
    of: int
    on_frontier: bool

    @property
    def thinned(self) -> bool:
        return len(self.points) < self.of

    @property
    def saved_by_cuts(self) -> int:
        """The number of plans that would be slower if merging followed A instead of S."""
        return sum(point.latency < point.latency_by_activations for point in self.points)

    @property
    def dropping(self) -> int:
        """The number of plans that drop layers or branches."""
        return sum(bool(point.dropped) for point in self.points)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedSpan:
    """One entry of the latency table. `replaced` is the time of its layers one by one; times are None if unknown.

    `time` is T[i, j, 1], with an activation at j, and `bare` is T[i, j, 0], without one. `shape` is the shape of the
    convolution if layers are dropped, and None if all of them are merged. `floored` says which of the times, first the
    bare one, are the least cost that the calibration counts.
    """

    span: Span
    time: float | None
    bare: float | None
    stdev: float | None
    replaced: float | None
    reason: str
    shape: ConvShape | None = None
    floored: tuple[bool, bool] = (False, False)

    @property
    def predicted(self) -> float | None:
        """The time with an activation; None if it is only the least cost that the calibration counts."""
        return None if self.floored[1] else self.time

    @property
    def name(self) -> str:
        return f"{self.span} as {format.shape(self.shape)}" if self.shape else str(self.span)

    @property
    def ratio(self) -> float | None:
        return self.predicted / self.replaced if self.predicted is not None and self.replaced else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredBlock:
    """One entry of the importance table. `score` and `importance` are None if it has no score."""

    block: FlaggedSpan
    score: float | None
    importance: float | None
    samples: int
    reason: str
    dropped: Drops = NOTHING

    @property
    def name(self) -> str:
        return str(BlockOption(self.block, self.dropped))

    @property
    def flags(self) -> str:
        return FLAGS[self.block.a, self.block.b]


def select_plans(frontier: Frontier, plan: SolvedPlan, most: int = MOST_PLANS) -> ShownPlans:
    """Return all plans of the frontier, or the best plans for `most` evenly spaced budgets, and the chosen plan.

    The fastest and the slowest plan are always among them, because they are the best for the first and last budget.
    """
    points, chosen = frontier.points, _point_of(plan)
    found = next((n for n, point in enumerate(points) if _is_same_plan(point, chosen)), None)
    best = points[_best_change(frontier)]
    kept = {*_answers(points, most), found} if len(points) > most else {*range(len(points)), found}
    kept.add(points.index(best))
    picked = [points[n] for n in sorted(n for n in kept if n is not None)]
    if found is None:
        picked.insert(bisect_right(picked, chosen.latency, key=lambda point: point.latency), chosen)
    at = next(n for n, point in enumerate(picked) if _is_same_plan(point, chosen))
    return ShownPlans(
        points=tuple(picked), chosen=at, best=picked.index(best), of=len(points), on_frontier=found is not None
    )


def _best_change(frontier: Frontier) -> int:
    """Return the index of the most important plan that merges or drops layers and is faster than the original.

    If there is none, return that of the most important plan.
    """
    for n, point in reversed(tuple(enumerate(frontier.points))):
        changes = len(point.cuts) < frontier.depth - 1 or bool(point.dropped)
        if changes and (frontier.original is None or point.latency < frontier.original):
            return n
    return len(frontier) - 1


def timed_spans(findings: Findings) -> tuple[TimedSpan, ...]:
    """Return the entries of the latency table."""
    layers = _predicted_layers(findings)
    return tuple(
        TimedSpan(
            span=entry.span,
            time=entry.times[1] if entry.times else None,
            bare=entry.times[0] if entry.times else None,
            stdev=entry.stdev,
            replaced=_sum_or_none(layers[l - 1] for l in entry.span.layers),
            reason=entry.reason or "",
            shape=entry.shape,
            floored=entry.floored,
        )
        for entry in findings.latency.entries
    )


def scored_blocks(findings: Findings) -> tuple[ScoredBlock, ...]:
    """Return the entries of the importance table."""
    base = findings.importance.base
    return tuple(
        ScoredBlock(
            block=entry.span,
            score=entry.mean if entry.samples else None,
            importance=entry.mean - base if entry.samples else None,
            samples=len(entry.samples),
            reason=entry.reason or "",
            dropped=entry.dropped,
        )
        for entry in findings.importance.entries
    )


def listed_times(findings: Findings, plans: ShownPlans, timed: tuple[TimedSpan, ...]) -> tuple[TimedSpan, ...]:
    """Return the entries to list: all of them, or those that the plans of the page use if they are too many."""
    if len(timed) <= MOST_ROWS:
        return timed
    network = findings.network
    keys = {key for point in plans.points for key in _segment_keys(point, network.depth)}
    used = {(span, left_of(network, span, dropped)[0]) for span, dropped in keys}
    return tuple(entry for entry in timed if (entry.span, entry.shape) in used)


def listed_scores(findings: Findings, plans: ShownPlans, scored: tuple[ScoredBlock, ...]) -> tuple[ScoredBlock, ...]:
    """Return the entries to list: all of them, or those of the blocks that the plans of the page use."""
    if len(scored) <= MOST_ROWS:
        return scored
    used = set()
    for point in plans.points:
        active = {0, *point.activations}
        for i, j in pairwise((0, *point.boundaries, findings.network.depth)):
            used.add((FlaggedSpan(i, j, i in active, j in active), point.dropped.within(Span(i, j))))
    return tuple(entry for entry in scored if (entry.block, entry.dropped) in used)


def explorer_data(findings: Findings, plans: ShownPlans) -> dict[str, Any]:
    """Return the data of explorer.js: every segment once, and the plans as lists of indices of segments.

    Positions count from 0 to L; layer l is at index l - 1. A span has a segment for each set of drops.
    """
    network, times = findings.network, findings.latency.layers
    used = sorted({key for point in plans.points for key in _segment_keys(point, network.depth)})
    number = {key: n for n, key in enumerate(used)}
    known = {(s.span, s.dropped): s for s in (*findings.frontier.segments, *findings.plan.segments)}
    layers = [
        {"name": layer.where, "shape": format.shape(layer.shape), "activation": layer.activation, "ms": times[l - 1]}
        for l, layer in enumerate(network.layers, start=1)
    ]
    floored = {(entry.span, entry.shape): entry.floored for entry in findings.latency.entries}
    segments = [_explorer_segment(network, known[key], floored) for key in used]
    shown = [
        {
            "ms": point.latency,
            "importance": point.importance,
            "segments": [number[key] for key in _segment_keys(point, network.depth)],
            "activations": list(point.activations),
        }
        for point in plans.points
    ]
    return {
        "layers": layers,
        "segments": segments,
        "plans": shown,
        "chosen": plans.chosen,
        "best": plans.best,
        "original": findings.frontier.original,
        "inserted": network.main_activation,
        "skips": [[skip.source, skip.target] for skip in network.skips],
        "barriers": list(network.barriers),
    }


def refusals(network: Network) -> list[tuple[str, str, str]]:
    """Return (kind, reason, places) of the refusals, grouped by reason."""
    groups = _grouped(((refusal.code, refusal.why), refusal.where) for refusal in network.refusals)
    return [(code.replace("-", " "), why, places) for (code, why), places in groups.items()]


def barriers(network: Network) -> list[tuple[int, str, str]]:
    """Return (position, layer before it, reason) of the barriers."""
    rows = []
    for position in network.barriers:
        refusal = network.why_not(Span(position - 1, position + 1))
        why = refusal.why.partition(": ")[2] if refusal else ""
        rows.append((position, network.layers[position - 1].where, why))
    return rows


def unusable_blocks(timed: Iterable[TimedSpan], scored: Iterable[ScoredBlock]) -> list[tuple[str, str, str]]:
    """Return (what is missing, reason, blocks) of the entries that have a reason instead of a number."""
    untimed = _grouped((entry.reason, entry.name) for entry in timed if entry.reason)
    unscored = _grouped((entry.reason, entry.name) for entry in scored if entry.reason)
    rows = [("no time", reason, places) for reason, places in untimed.items()]
    return rows + [("no score", reason, places) for reason, places in unscored.items()]


def environments(findings: Findings) -> dict[str, dict[str, object]]:
    """Return the stated fields of each environment, by the name of its part; environments without any are left out."""
    before, after = findings.before, findings.after
    given = {
        "Latency table": findings.latency.environment,
        "Importance table": findings.importance.environment,
        "Original, measured": before.environment if before else None,
        "Compressed, measured": after.environment if after else None,
        "The run": findings.environment,
    }
    stated = {name: environment.stated for name, environment in given.items() if environment is not None}
    return {name: fields for name, fields in stated.items() if fields}


def _segment_keys(point: Point, depth: int) -> list[tuple[Span, Drops]]:
    return [(span, point.dropped.within(span)) for span in point.spans(depth)]


def _explorer_segment(network: Network, segment: Segment, floored: _Floored) -> list[Any]:
    """Return a segment as explorer.js reads it. The shape of an empty one is None."""
    span, dropped, more = segment.span, segment.dropped, {}
    shape = None if segment.empty else format.shape(network.merged_shape(span, dropped))
    parts = [span.i, span.j, segment.times[1], segment.times[0], segment.replaced, shape]
    if dropped:
        more = {"layers": list(dropped.layers), "branches": [[branch.i, branch.j] for branch in dropped.branches]}
    at_floor = floored.get((span, left_of(network, span, dropped)[0]), (False, False))
    if any(at_floor):
        more["floored"] = list(at_floor)
    return [*parts, more] if more else parts


def _predicted_layers(findings: Findings) -> list[float | None]:
    """Return the times of the single layers, None where a time is at the floor of the calibration."""
    times, own = list(findings.latency.layers), findings.network.activations
    for entry in findings.latency.entries:
        if len(entry.span) == 1 and entry.shape is None and entry.floored[entry.span.j in own]:
            times[entry.span.j - 1] = None
    return times


def _answers(points: tuple[Point, ...], most: int) -> set[int]:
    """Return the indices of the best plans for evenly spaced budgets from the fastest plan to the slowest."""
    low, high = points[0].latency, points[-1].latency
    budgets = [low + (high - low) * n / (most - 1) for n in range(most - 1)]
    latencies = [point.latency for point in points]
    return {*(bisect_right(latencies, budget) - 1 for budget in budgets), len(points) - 1}


def _point_of(plan: SolvedPlan) -> Point:
    return Point(
        latency=plan.latency,
        importance=plan.importance,
        latency_by_activations=plan.latency_by_activations,
        activations=tuple(sorted(plan.plan.activations)),
        cuts=plan.plan.cuts,
        boundaries=plan.boundaries,
        dropped=plan.plan.dropped,
    )


def _is_same_plan(one: Point, two: Point) -> bool:
    """Compare A, S and the drops only: the predictions differ if a table was measured again."""
    return (one.cuts, set(one.activations), one.dropped) == (two.cuts, set(two.activations), two.dropped)


def _sum_or_none(times: Iterable[float | None]) -> float | None:
    every = list(times)
    known = [time for time in every if time is not None]
    return sum(known) if len(known) == len(every) else None


def _grouped(pairs: Iterable[tuple[Key, str]]) -> dict[Key, str]:
    """Return the places of each key as text, in the order in which they occur."""
    groups: dict[Key, dict[str, None]] = {}
    for key, place in pairs:
        groups.setdefault(key, {})[place] = None
    return {key: format.join_and(places, MOST_PLACES) for key, places in groups.items()}
