"""The frontier with dropped layers and branches, compared with every plan in exact arithmetic."""

from __future__ import annotations

from collections import Counter

import pytest

from depthfold.core import Frontier, ImportanceTable, LatencyTable, Network
from depthfold.errors import TableError
from depthfold.solver import solve
from oracle import rounded_up
from oracle_moves import Segments, every_chain, frontier_with_moves
from tables import batches, moves_instance

BATCH, BATCHES = 100, 21


@pytest.mark.parametrize("batch", batches(BATCHES))
def test_frontier_equals_every_plan(batch: int) -> None:
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        network, latency, importance = moves_instance(seed)
        expected = frontier_with_moves(latency, importance, network)
        if not expected:
            with pytest.raises(TableError):
                solve(latency, importance, network=network)
            continue
        frontier = solve(latency, importance, network=network)
        found = [(point.latency, point.importance) for point in frontier.points]
        assert found == [(time / 10**9, float(value)) for time, value in expected], f"seed {seed}"
        if seed % 4 == 0:
            check_plans(frontier, network, latency, importance)


@pytest.mark.parametrize("batch", range(3))
def test_whole_blocks_equal_every_plan(batch: int) -> None:
    """LayerMerge's rule: every block is one segment."""
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        network, latency, importance = moves_instance(seed)
        expected = frontier_with_moves(latency, importance, network, whole_blocks=True)
        if not expected:
            with pytest.raises(TableError):
                solve(latency, importance, network=network, merge_along="B")
            continue
        frontier = solve(latency, importance, network=network, merge_along="B")
        found = [(point.latency, point.importance) for point in frontier.points]
        assert found == [(time / 10**9, float(value)) for time, value in expected], f"seed {seed}"
        assert all(point.cuts == point.boundaries for point in frontier.points)


@pytest.mark.slow
def test_instances_cover_every_kind() -> None:
    count: Counter[str] = Counter()
    for seed in range(0, BATCH * BATCHES, 8):
        network, latency, importance = moves_instance(seed)
        count += Counter(kinds_of_tables(network, latency, importance))
        try:
            frontier = solve(latency, importance, network=network)
        except TableError:
            count["no plan"] += 1
        else:
            count += Counter(kinds_of_plans(frontier))
    assert all(count[kind] >= 5 for kind in KINDS), count


KINDS = (
    "residual", "nested", "projection", "barrier", "stride", "seven layers", "untimed", "negative", "ties", "no plan",
    "drops layers", "drops branches", "drops both", "boundary without activation", "cut inside a block",
    "segment across blocks", "empty segment",
)  # fmt: skip


def kinds_of_tables(network: Network, latency: LatencyTable, importance: ImportanceTable) -> list[str]:
    spans = [skip.span for skip in network.skips]
    found = {
        "residual": bool(spans),
        "nested": any(one != two and one.contains(two) for one in spans for two in spans),
        "projection": any(skip.projection for skip in network.skips),
        "barrier": bool(network.barriers),
        "stride": any(max(layer.shape.stride) > 1 for layer in network.layers),
        "seven layers": network.depth == 7,
        "untimed": any(entry.reason for entry in latency.entries),
        "negative": max(importance.options.values(), default=0) < 0,
        "ties": len(set(latency.shape_times.values())) < len(latency.shape_times),
    }
    return [kind for kind, here in found.items() if here]


def kinds_of_plans(frontier: Frontier) -> list[str]:
    points = frontier.points
    found = {
        "drops layers": any(point.dropped.layers for point in points),
        "drops branches": any(point.dropped.branches for point in points),
        "drops both": any(point.dropped.layers and point.dropped.branches for point in points),
        "boundary without activation": any(set(point.boundaries) - set(point.activations) for point in points),
        "cut inside a block": any(set(point.cuts) - set(point.boundaries) for point in points),
        "segment across blocks": any(set(point.boundaries) - set(point.cuts) for point in points),
        "empty segment": any(segment.empty for segment in frontier.segments),
    }
    return [kind for kind, here in found.items() if here]


def check_plans(frontier: Frontier, network: Network, latency: LatencyTable, importance: ImportanceTable) -> None:
    """The plans fit the network, and their sums are those of the tables."""
    segments = Segments(latency, network)
    best = {}
    for chain in every_chain(importance):
        key = (chain.activations, chain.boundaries, chain.dropped)
        best[key] = max(best.get(key, chain.importance), chain.importance)
    for solved in frontier:
        plan = solved.plan
        assert [segment.span for segment in solved.segments] == list(network.segments(plan))
        assert solved.importance == float(best[plan.activations, solved.boundaries, plan.dropped])
        total = 0
        for segment in solved.segments:
            own = segments.times(segment.span.i, segment.span.j, plan.dropped)
            assert own == tuple(map(rounded_up, segment.times))
            assert segment.shape == network.merged_shape(segment.span, plan.dropped.within(segment.span))
            total += own[segment.span.j in plan.activations]
        assert solved.latency == total / 10**9 <= solved.latency_by_activations
        if network.depth not in network.activations - plan.activations:
            assert latency.predict(network, plan) == solved.latency
