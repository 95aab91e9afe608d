"""The frontier compared with exhaustive search over all plans, in exact arithmetic."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from depthfold.core import FlaggedSpan, Frontier, ImportanceTable, LatencyTable, Span
from depthfold.errors import TableError
from depthfold.solver import solve
from oracle import every_merging, exhaustive_frontier, rounded_up
from tables import batches, small_instance

BATCH = 100


@pytest.mark.parametrize("batch", batches(24))
def test_frontier_equals_exhaustive_search(batch: int) -> None:
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        latency, importance = small_instance(seed)
        expected = exhaustive_frontier(latency, importance)
        if not expected:
            with pytest.raises(TableError):
                solve(latency, importance)
            continue
        frontier = solve(latency, importance)
        found = [(point.latency, point.importance) for point in frontier.points]
        assert found == [(time / 10**9, float(value)) for time, value in expected], f"seed {seed}"
        check_sums(frontier, latency, importance)


@pytest.mark.slow
def test_instances_cover_every_kind() -> None:
    tables = [small_instance(seed) for seed in range(24 * BATCH)]
    count = {
        "plain": sum(not importance.extended for _, importance in tables),
        "extended": sum(importance.extended for _, importance in tables),
        "nine layers": sum(latency.depth == 9 for latency, _ in tables),
        "dense": sum(len(latency.entries) == latency.depth * (latency.depth + 1) // 2 for latency, _ in tables),
        "not covered": sum(not every_merging(latency) for latency, _ in tables),
        "untimed": sum(any(entry.reason for entry in latency.entries) for latency, _ in tables),
        "zero latency": sum((0.0, 0.0) in latency.times.values() for latency, _ in tables),
        "negative": sum(max(importance.importances.values()) < 0 for _, importance in tables),
        "ties": sum(len(set(latency.times.values())) < len(latency.times) for latency, _ in tables),
    }
    assert all(number >= 10 for number in count.values()), count


def check_sums(frontier: Frontier, latency: LatencyTable, importance: ImportanceTable) -> None:
    """A is a subset of B and S, the segments and blocks are in the tables, and the sums are exact."""
    times, values, L = latency.times, importance.importances, frontier.depth
    for solved in frontier:
        plan = solved.plan
        inner = plan.activations - {L}
        assert inner <= set(plan.cuts)
        assert inner <= set(solved.boundaries)
        segments = [times[Span(i, j)][1] for i, j in pairwise((0, *plan.cuts, L))]
        assert solved.latency == sum(map(rounded_up, segments)) / 10**9
        blocks = [
            values[FlaggedSpan(i, j, i == 0 or i in plan.activations, j in plan.activations)]
            for i, j in pairwise((0, *solved.boundaries, L))
        ]
        assert solved.importance == math.fsum(blocks)
