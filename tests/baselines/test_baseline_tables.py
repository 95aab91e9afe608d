"""LayerMerge's search against exhaustive search, and the table of constant importances."""

import math
from itertools import pairwise

import pytest

import depthfold as df
from depthfold.baselines import constant_importance, layermerge_frontier
from depthfold.core import Score, Surrogate
from depthfold.errors import InvalidValue
from structures import Builder, mobilenet_v2, plain_chain
from tables import plausible_tables, tables_with_moves


def residual():
    """A layer, a residual of two layers without an activation at its end, and a layer."""
    build = Builder(4, 8)
    build.add(4)
    build.add(4)
    build.add(4, None)
    build.skip(1)
    build.add(4)
    return build.network("residual")


def every_plan(network, latency, importance, value):
    """Yield latency and value of all plans of LayerMerge, by recursion over its blocks."""
    times = {(entry.span, entry.shape): entry.times for entry in latency.entries}

    def extend(i, a, time, total):
        if i == network.depth:
            yield time, total
        for entry in importance.entries:
            block = entry.span
            # Several layers always end in an activation, a single one only if the network has one there.
            b = block.j in network.activations or block.j - block.i > 1
            if (block.i, block.a, block.b) == (i, a, b) and not entry.dropped.branches:
                shape = network.merged_shape(block.span, entry.dropped) if entry.dropped else None
                yield from extend(block.j, b, time + times[block.span, shape][b], total + value(entry.mean))

    yield from extend(0, True, 0.0, 0.0)


def pareto(points):
    """Return the points that no other one beats in both latency and value, by rising latency."""
    best, front = -math.inf, []
    for time, value in sorted(points, key=lambda point: (point[0], -point[1])):
        if value > best + 1e-12:
            best = value
            front.append((time, value))
    return front


@pytest.mark.parametrize("make", [residual, lambda: plain_chain(4)], ids=["residual", "chain"])
@pytest.mark.parametrize("exponential", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_frontier_is_that_of_exhaustive_search(make, exponential, seed):
    network = make()
    latency, importance = tables_with_moves(network, "full", ("merge", "drop-layers", "drop-branches"), seed)
    frontier = layermerge_frontier(latency, importance, network, exponential=exponential)

    def value(change):
        return math.exp(change / 100) if exponential else change

    expected = pareto(every_plan(network, latency, importance, value))
    assert len(expected) > 1
    found = [(point.latency, point.importance) for point in frontier.points]
    assert found == [pytest.approx(point, abs=1e-7) for point in expected]
    assert not any(solved.plan.dropped.branches for solved in frontier)
    assert any(solved.plan.dropped.layers for solved in frontier)


def test_exponential_counts_changes_from_the_base_in_per_cent():
    network = plain_chain(2)
    latency, _ = plausible_tables(network.spans(), network.flagged_spans(), 0)
    scores = {(0, 1): 90.0, (1, 2): 80.0, (0, 2): 70.0}
    entries = tuple(Score(span=b, samples=(scores[b.i, b.j],)) for b in network.flagged_spans())
    frontier = layermerge_frontier(latency, df.ImportanceTable(base=90.0, entries=entries), network)
    values = {len(solved.segments): solved.importance for solved in frontier}
    assert values == {1: pytest.approx(math.exp(-0.2)), 2: pytest.approx(1 + math.exp(-0.1))}
    assert frontier.importance_meaning == "Importance: predicted change of the sum of exp(I / 100)"
    divergences = df.ImportanceTable(base=0.0, entries=entries, quantity="the agreement")
    with pytest.raises(InvalidValue, match=r"for accuracy, in points, and this table has the agreement\. Use expon"):
        layermerge_frontier(latency, divergences, network)
    assert layermerge_frontier(latency, divergences, network, exponential=False).quantity == "the agreement"


def test_surrogate_counts_importances_and_blocks():
    network = plain_chain(2)
    latency, _ = plausible_tables(network.spans(), network.flagged_spans(), 0)
    scores = {(0, 1): 90.0, (1, 2): 80.0, (0, 2): 70.0}
    entries = tuple(Score(span=b, samples=(scores[b.i, b.j],)) for b in network.flagged_spans())
    surrogate = Surrogate(intercept=50.0, slope=0.5, per_block=3.0, tau=1.0, plans=())
    table = df.ImportanceTable(base=90.0, entries=entries)
    frontier = layermerge_frontier(latency, table, network, surrogate=surrogate)
    values = {len(solved.segments): solved.importance for solved in frontier}
    assert values == {1: pytest.approx(0.5 * -20 + 3), 2: pytest.approx(0.5 * -10 + 2 * 3)}


def test_constant_importance_says_only_how_many_blocks_are_merged():
    network = mobilenet_v2()
    table = constant_importance(network)
    assert table.fingerprint == network.fingerprint
    assert len(table.entries) == 315
    assert {(len(entry.span.span) > 1, entry.mean) for entry in table.entries} == {(True, -1.0), (False, 0.0)}
    latency, _ = plausible_tables(network.spans(), network.flagged_spans(), 0)
    for solved in df.solve(latency, table, network=network):
        ends = [0, *solved.boundaries, network.depth]
        assert solved.importance == -sum(j - i > 1 for i, j in pairwise(ends))
