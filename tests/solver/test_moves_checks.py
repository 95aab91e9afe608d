"""Tables with dropped layers that do not fit, the cache of shapes, and the special cases without drops."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import get_args

import pytest

from depthfold.core import Drops, FlaggedSpan, ImportanceTable, LatencyTable, Score, Span, Timing
from depthfold.core.options import Move
from depthfold.errors import InvalidValue, PlanError, TableError
from depthfold.solver import solve
from depthfold.solver.checks import check_scored
from depthfold.solver.edges import Separate
from depthfold.solver.joint import Joint
from depthfold.solver.objective import importance_array, objective
from depthfold.solver.stage_two import algorithm_2_and_4
from depthfold.stage_one import Shapes, Times, time_array
from structures import Builder, chain, mobilenet_v2, resnet34, shape
from tables import plausible_tables, random_network, small_instance, tables_with_moves, two_times_instance


def two_layers(**changed: object) -> tuple[LatencyTable, ImportanceTable]:
    """Tables of chain(3, 3) in which layer 2 can be dropped from (0, 2]."""
    given = {"shape": shape(4, 4), "dropped": Drops([2])} | changed
    spans = (Span(0, 1), Span(1, 2), Span(0, 2))
    timings = [Timing(span=span, times=(1.0, 1.0)) for span in spans]
    timings += [Timing(span=Span(0, 2), times=(0.5, 0.5), shape=given["shape"])]
    blocks = [FlaggedSpan(span.i, span.j, True, True) for span in spans]
    scores = [Score(span=block, samples=(1.0,)) for block in blocks]
    scores += [Score(span=blocks[2], samples=(0.5,), dropped=given["dropped"])]
    return LatencyTable(entries=tuple(timings)), ImportanceTable(entries=tuple(scores))


def test_plan_that_drops_a_layer_is_found() -> None:
    frontier = solve(*two_layers(), network=chain(3, 3))
    assert [(point.latency, point.importance, point.dropped) for point in frontier.points] == [
        (0.5, 0.5, Drops([2])), (1.0, 1.0, Drops()), (2.0, 2.0, Drops()),
    ]  # fmt: skip


def test_tables_with_drops_need_the_network() -> None:
    with pytest.raises(InvalidValue, match=r"have entries with dropped layers, .* Pass it to solve\(\) as network="):
        solve(*two_layers())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"shape": shape(4, 4, kernel=1)}, r"no entry for \(0, 2\] as 3x3, 4 -> 4, which is left without layer"),
        ({"shape": shape(4, 8)}, r"\(0, 2\] as 3x3, 4 -> 8, which it cannot become. .* are 5x5, 4 -> 4"),
        ({"shape": shape(4, 4, kernel=5)}, r"\(0, 2\] as 5x5, 4 -> 4, which is the shape of all its layers"),
        (
            {"dropped": Drops(branches=[Span(0, 2)])},
            r"without the branch \(0, 2\], but not all of that can be dropped",
        ),
    ],
)
def test_drops_that_do_not_fit_are_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(TableError, match=message):
        solve(*two_layers(**changed), network=chain(3, 3))


def test_layer_that_cannot_be_dropped_is_refused() -> None:
    """Layer 2 does not keep the size of its map."""
    build = Builder(4, 16)
    build.add(4)
    build.add(4, padding=0)
    with pytest.raises(TableError, match=r"has \(0, 2\], flags 11 without layer 2, but not all of that can be"):
        solve(*two_layers(), network=build.network("net"))


def test_unknown_rule_of_merging_is_refused() -> None:
    with pytest.raises(InvalidValue, match="merge_along must be one of 'S', 'B', found 'A'"):
        solve(*two_layers(), network=chain(3, 3), merge_along="A")


def test_shapes_equal_those_of_the_network() -> None:
    compared = 0
    for seed in range(150):
        rng = random.Random(seed)
        network = random_network(rng, 6)
        shapes = Shapes(network)
        for span in network.spans("full"):
            layers = [l for l in network.droppable_layers if l in span.layers and rng.random() < 0.5]
            branches = [one for one in network.droppable_branches if span.contains(one) and rng.random() < 0.3]
            inside = {l for branch in branches for l in branch.layers}
            dropped = Drops(set(layers) - inside, branches)
            mask = shapes.mask(dropped)
            assert shapes.drops(mask) == dropped
            try:
                expected = network.merged_shape(span, dropped)
            except PlanError:
                expected = None
            assert shapes.shape(span.i, span.j, mask) == expected
            compared += bool(dropped)
    assert compared > 500


@pytest.mark.parametrize("make", [small_instance, two_times_instance])
def test_chains_without_drops_equal_the_two_separate_stages(make) -> None:
    """The general program on the paper's problem: the same labels at L."""
    compared = 0
    for seed in range(300):
        latency, importance = make(seed)
        importances, _ = objective(importance, None)
        try:
            check_scored((block for block, _ in importances), latency.depth)
            separate = Separate(time_array(latency), importance_array(importances, latency.depth))
        except TableError:
            continue
        joint = Joint(Times(latency, None), latency.depth, importances)
        one, two = (algorithm_2_and_4(stage.edges, latency.depth) for stage in (separate, joint))
        assert one.keys() == two.keys()
        if latency.depth in one:
            assert one[latency.depth].t.tolist() == two[latency.depth].t.tolist()
            assert one[latency.depth].D.tolist() == pytest.approx(two[latency.depth].D.tolist(), abs=1e-12)
            compared += 1
    assert compared > 250


def test_paper_moves_alone_give_the_plans_of_the_paper() -> None:
    """All options of all moves are in the tables, but only those without drops have scores."""
    for network in (mobilenet_v2(), resnet34()):
        latency, importance = tables_with_moves(network, "paper", get_args(Move), 2)
        whole = replace(latency, entries=tuple(entry for entry in latency.entries if entry.shape is None))
        kept = tuple(entry for entry in importance.entries if not entry.dropped)
        left_out = tuple(
            Score(span=entry.span, reason="not measured", dropped=entry.dropped)
            for entry in importance.entries
            if entry.dropped
        )
        expected = solve(whole, ImportanceTable(entries=kept), network=network)
        found = solve(latency, ImportanceTable(entries=kept + left_out), network=network)
        assert set(found.unscored).isdisjoint(
            network.flagged_spans()
        )  # residuals that are dropped, with nothing inserted
        assert replace(found, unscored=()) == expected


def test_whole_blocks_of_a_plain_table_are_segments_along_the_activations() -> None:
    """LayerMerge's recurrence: with all flags 1, S = A, and the time of a plan is the sum of T[i, j, 1]."""
    network = resnet34()
    latency, importance = plausible_tables(network.spans(), network.flagged_spans(), 3)
    frontier = solve(latency, importance, merge_along="B")
    front = {0: [(0.0, 0.0)]}
    for j in range(1, network.depth + 1):
        reached = [
            (t + latency.times[block.span][1], value + importance.importances[block])
            for block in importance.importances
            if block.j == j
            for t, value in front[block.i]
        ]
        front[j] = []
        for t, value in sorted(reached, key=lambda label: (label[0], -label[1])):
            if not front[j] or value > front[j][-1][1]:
                front[j].append((t, value))
    assert [point.latency for point in frontier.points] == pytest.approx([t for t, _ in front[network.depth]])
    assert [point.importance for point in frontier.points] == pytest.approx([v for _, v in front[network.depth]])
    assert all(set(point.cuts) == set(point.activations) - {network.depth} for point in frontier.points)
