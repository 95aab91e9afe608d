"""T[i, j, b]: a segment takes its time with or without an activation at its end, as the plan has it."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from depthfold.core import Budget, Frontier, ImportanceTable, LatencyTable, Plan, SolvedPlan, Span
from depthfold.errors import TableError
from depthfold.solver import solve
from oracle import exhaustive_frontier, fastest_with, milp_best, rounded_up
from structures import mobilenet_v2
from tables import (
    batches,
    importance_table,
    latency_table,
    plausible_tables,
    small_instance,
    two_times_instance,
    with_two_times,
)

BATCH = 50


def solved(latency: LatencyTable, importance: ImportanceTable) -> Frontier | None:
    """None if no plan fits the tables."""
    try:
        return solve(latency, importance)
    except TableError:
        return None


@pytest.mark.parametrize("batch", batches(12))
def test_frontier_equals_exhaustive_search(batch: int) -> None:
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        latency, importance = two_times_instance(seed)
        expected = exhaustive_frontier(latency, importance)
        if not expected:
            with pytest.raises(TableError):
                solve(latency, importance)
            continue
        found = [(point.latency, point.importance) for point in solve(latency, importance).points]
        assert found == [(time / 10**9, float(value)) for time, value in expected], f"seed {seed}"


@pytest.mark.slow
def test_instances_cover_every_kind() -> None:
    """A solver that mixes up the two times would fail: in the middle, at the end, and both ways."""
    names = ("inactive cuts", "inactive ends", "other frontiers", "slower without", "plain", "by A")
    count = dict.fromkeys(names, 0)
    for seed in range(12 * BATCH):
        latency, importance = two_times_instance(seed)
        if (frontier := solved(latency, importance)) is None:
            continue
        L = latency.depth
        count["inactive cuts"] += any(set(point.cuts) - set(point.activations) for point in frontier.points)
        count["inactive ends"] += any(L not in point.activations for point in frontier.points)
        count["other frontiers"] += frontier.points != solve(*small_instance(seed)).points
        count["slower without"] += any(without > with_one for without, with_one in latency.times.values())
        count["plain"] += not importance.extended
        count["by A"] += any(point.latency_by_activations > point.latency for point in frontier.points)
    assert all(number >= 20 for number in count.values()), count


def test_every_plan_has_the_times_of_its_activations() -> None:
    for seed in range(300):
        latency, importance = two_times_instance(seed)
        times, L = latency.times, latency.depth
        for solved_plan in solved(latency, importance) or ():
            plan = solved_plan.plan
            spans = [Span(i, j) for i, j in pairwise((0, *plan.cuts, L))]
            parts = [times[span][span.j in plan.activations] for span in spans]
            assert solved_plan.latency == sum(map(rounded_up, parts)) / 10**9
            assert [s.times[s.span.j in plan.activations] for s in solved_plan.segments] == parts
            A = sum(1 << p for p in plan.activations)
            assert fastest_with(latency, A) == sum(map(rounded_up, parts))  # Proposition 2: S is the fastest for its A
            if set(plan.cuts) | {L} == plan.activations:  # no activation is left out
                assert solved_plan.latency == sum(rounded_up(times[span][1]) for span in spans) / 10**9


@pytest.mark.parametrize("seed", [1])
def test_frontier_equals_a_mixed_integer_program(seed: int) -> None:
    network = mobilenet_v2()
    latency, importance = plausible_tables(network.spans(), network.flagged_spans(), seed)
    latency = with_two_times(latency, lambda span, time: time * (0.6 + 0.05 * ((span.i + span.j) % 7)))
    frontier = solve(latency, importance, network=network)
    gaps = [(a.latency, b.latency) for a, b in pairwise(frontier.points) if b.latency - a.latency > 1e-3]
    assert len(gaps) >= 6
    for low, high in (gaps[n * (len(gaps) - 1) // 5] for n in range(6)):
        budget = (low + high) / 2
        time, value = milp_best(latency, importance, budget)
        plan = frontier.at(Budget.milliseconds(budget))
        assert plan.latency <= budget and time <= budget
        assert value <= plan.importance <= value + 1e-6  # as close as HiGHS comes
        assert latency.predict(network, plan) == plan.latency


def test_equal_times_give_the_frontier_of_one_time() -> None:
    network = mobilenet_v2()
    instances = [plausible_tables(network.spans(), network.flagged_spans(), 3), *map(small_instance, range(200))]
    for latency, importance in instances:
        if len(latency.entries) < 100 and solved(latency, importance) is None:
            continue
        frontier = solve(latency, importance)
        assert solve(with_two_times(latency, lambda span, time: time), importance) == frontier


def test_shorter_times_without_an_activation_never_hurt() -> None:
    faster = 0
    for seed in range(400):
        latency, importance = two_times_instance(seed, cheaper=True)
        if (frontier := solved(latency, importance)) is None:
            continue
        for point in solve(*small_instance(seed)).points:
            found = [one for one in frontier.points if one.latency <= point.latency]
            assert found and found[-1].importance >= point.importance
            faster += min(one.latency for one in found if one.importance >= point.importance) < point.latency
    assert faster > 200


def test_costly_activation_at_the_end_is_left_out() -> None:
    values = {(0, 1, 1, 0): 1.0, (0, 1, 1, 1): 2.0}
    table = with_two_times(latency_table({(0, 1): 3.0}), lambda span, time: 1.0)
    fast, good = solve(table, importance_table(values)).plans
    assert (fast.plan, fast.latency, fast.importance) == (Plan((), ()), 1.0, 1.0)
    assert (good.plan, good.latency, good.importance) == (Plan({1}, ()), 3.0, 2.0)


def test_cut_may_pay_only_without_its_activation() -> None:
    """(0, 1] and (1, 2] take 2 + 2 with an activation between, 0.5 + 2 without one, and 3 as one convolution."""
    times = {(0, 1): 2.0, (1, 2): 2.0, (0, 2): 3.0}
    values = {(0, 1, 1, 0): 0.0, (0, 1, 1, 1): 1.0, (1, 2, 0, 1): 0.0, (1, 2, 1, 1): 0.0, (0, 2, 1, 1): -1.0}
    assert [solved_plan.plan.cuts for solved_plan in solve(latency_table(times), importance_table(values))] == [
        (),
        (1,),
    ]
    table = with_two_times(latency_table(times), lambda span, time: 0.5 if span == Span(0, 1) else time)
    fast, good = solve(table, importance_table(values)).plans
    assert (fast.plan, fast.latency, fast.latency_by_activations) == (Plan({2}, (1,)), 2.5, 3.0)
    assert (good.plan, good.latency, good.latency_by_activations) == (Plan({1, 2}, (1,)), 4.0, 4.0)
    assert [line.split()[-3] for line in str(fast).splitlines()[-2:]] == ["0.5", "2"]  # the column of milliseconds
    assert [line.split()[-3] for line in str(good).splitlines()[-2:]] == ["2", "2"]
    assert SolvedPlan.loads(fast.dumps()) == fast


def test_ablation_leaves_out_the_same_activations() -> None:
    """Between two activations as few spans as possible, and the fastest of these, by trying all of them."""
    chains = 0
    for seed in range(400):
        latency, importance = two_times_instance(seed)
        frontier = solved(latency, importance)
        for point in frontier.points if frontier else ():
            ends = (0, *(p for p in point.activations if p < latency.depth), latency.depth)
            ways = [fewest(latency, k, l, l in point.activations) for k, l in pairwise(ends)]
            chains += any(count > 1 for count, _ in ways)
            assert point.latency_by_activations == sum(time for _, time in ways) / 10**9, f"seed {seed}"
    assert chains > 50


def fewest(latency: LatencyTable, k: int, l: int, active: bool) -> tuple[int, int]:
    """The least number of spans from k to l, and the least sum of so many. Only the last may have an activation."""
    times = latency.times
    for count in range(1, l - k + 1):
        sums = []
        for inner in combinations(range(k + 1, l), count - 1):
            spans = [Span(i, j) for i, j in pairwise((k, *inner, l))]
            if all(span in times for span in spans):
                sums.append(sum(rounded_up(times[s][0]) for s in spans[:-1]) + rounded_up(times[spans[-1]][active]))
        if sums:
            return count, min(sums)
    raise AssertionError("the frontier has a plan, so there is a way")
