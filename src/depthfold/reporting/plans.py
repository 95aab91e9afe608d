"""The plans that the explorer shows, in a compact form: every segment once, and plans as lists of indices."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from depthfold.core import Frontier, Point, SolvedPlan, Span
from depthfold.reporting import words
from depthfold.reporting.findings import Findings

MOST = 300  # as many positions as a slider of a few hundred pixels can tell apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """The plans on the page, the fastest first. `chosen` is the index of the chosen one among them, `of` how many
    plans the frontier has, `on_frontier` whether the chosen one is among those."""

    points: tuple[Point, ...]
    chosen: int
    of: int
    on_frontier: bool

    @property
    def thinned(self) -> bool:
        return len(self.points) < self.of


def shown(frontier: Frontier, plan: SolvedPlan, most: int = MOST) -> Shown:
    """All plans of the frontier, or those that answer so many budgets at equal distances; and always the chosen one.

    The fastest and the slowest plan are the answers to the first and to the last budget, so they always stay.
    """
    points, chosen = frontier.points, _point_of(plan)
    found = next((n for n, point in enumerate(points) if _same(point, chosen)), None)
    kept = {*_answers(points, most), found} if len(points) > most else {*range(len(points)), found}
    picked = [points[n] for n in sorted(n for n in kept if n is not None)]
    if found is None:
        picked.insert(bisect_right(picked, chosen.latency, key=lambda point: point.latency), chosen)
    at = next(n for n, point in enumerate(picked) if _same(point, chosen))
    return Shown(points=tuple(picked), chosen=at, of=len(points), on_frontier=found is not None)


def explorer_data(findings: Findings, plans: Shown) -> dict[str, Any]:
    """What explorer.js decodes. Positions count from 0 to L, as in the nouns; layer l is at index l - 1."""
    network, layers = findings.network, findings.latency.layers
    used = sorted({ends for point in plans.points for ends in _ends(point, network.depth)})
    number = {ends: n for n, ends in enumerate(used)}
    known = {(s.span.i, s.span.j): s for s in (*findings.frontier.segments, *findings.plan.segments)}
    return {
        "layers": [
            {
                "name": layer.where,
                "shape": words.shape(layer.shape),
                "activation": layer.activation,
                "ms": layers[l - 1],
            }
            for l, layer in enumerate(network.layers, start=1)
        ],
        "segments": [
            [
                *ends,
                known[ends].times[1],
                known[ends].times[0],
                known[ends].replaced,
                words.shape(network.merged_shape(Span(*ends))),
            ]
            for ends in used
        ],
        "plans": [
            {
                "ms": point.latency,
                "importance": point.importance,
                "segments": [number[ends] for ends in _ends(point, network.depth)],
                "activations": list(point.activations),
            }
            for point in plans.points
        ],
        "chosen": plans.chosen,
        "original": findings.frontier.original,
        "inserted": network.own_activation,
        "skips": [[skip.source, skip.target] for skip in network.skips],
        "barriers": list(network.barriers),
    }


def _ends(point: Point, depth: int) -> list[tuple[int, int]]:
    return list(pairwise((0, *point.cuts, depth)))


def _answers(points: tuple[Point, ...], most: int) -> set[int]:
    """The best plan for each of so many budgets, at equal distances between the fastest plan and the slowest."""
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
    )


def _same(one: Point, two: Point) -> bool:
    """Whether two points are the same plan, A and S. Their predictions may differ, where a table was made again."""
    return one.cuts == two.cuts and set(one.activations) == set(two.activations)
