"""Times with and without an activation at the end: a segment takes the one that the plan's activations say."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, pairwise

import pytest

from depthfold.core import Frontier, ImportanceTable, LatencyTable, Plan, SolvedPlan, Span
from depthfold.errors import TableError
from depthfold.solver import solve, stage_two
from depthfold.solver.arrays import Floats, Ints
from depthfold.solver.stage_two import contenders
from oracle import exhaustive_frontier, fastest_with, milp_best
from structures import mobilenet_v2
from tables import bare_instance, importance_table, latency_table, plausible_tables, small_instance, with_bare

BATCH = 50


def solved(latency: LatencyTable, importance: ImportanceTable) -> Frontier | None:
    """None where no plan fits the tables."""
    try:
        return solve(latency, importance)
    except TableError:
        return None


@pytest.mark.parametrize("batch", range(12))
def test_equals_exhaustive_search(batch: int) -> None:
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        latency, importance = bare_instance(seed)
        expected = exhaustive_frontier(latency, importance)
        if not expected:
            with pytest.raises(TableError):
                solve(latency, importance)
            continue
        found = [(point.latency, point.importance) for point in solve(latency, importance).points]
        assert found == [(rounded_up(time), float(value)) for time, value in expected], f"seed {seed}"


def test_the_instances_are_of_every_kind() -> None:
    """What a solver that mixes up the two times would get wrong occurs: in the middle, at the end, and both ways."""
    count = {"bare cuts": 0, "bare ends": 0, "other frontiers": 0, "slower bare": 0, "plain": 0, "by A": 0}
    for seed in range(12 * BATCH):
        latency, importance = bare_instance(seed)
        if (frontier := solved(latency, importance)) is None:
            continue
        L, times, bare = latency.depth, latency.times_if(True), latency.times_if(False)
        count["bare cuts"] += any(set(point.cuts) - set(point.activations) for point in frontier.points)
        count["bare ends"] += any(L not in point.activations for point in frontier.points)
        count["other frontiers"] += frontier.points != solve(*small_instance(seed)).points
        count["slower bare"] += any(bare[span] > times[span] for span in times)
        count["plain"] += not importance.extended
        count["by A"] += any(point.latency_by_activations > point.latency for point in frontier.points)
    assert all(number >= 20 for number in count.values()), count


def test_every_plan_is_what_it_says() -> None:
    for seed in range(300):
        latency, importance = bare_instance(seed)
        times, bare, L = latency.times_if(True), latency.times_if(False), latency.depth
        for plan in solved(latency, importance) or ():
            spans = [Span(i, j) for i, j in pairwise((0, *plan.cuts, L))]
            parts = [times[span] if span.j in plan.activations else bare[span] for span in spans]
            assert plan.latency == rounded_up(sum(map(Fraction, parts)))
            assert [segment.takes(segment.span.j in plan.activations) for segment in plan.segments] == parts
            A = sum(1 << p for p in plan.activations)
            assert fastest_with(latency, A) == sum(map(Fraction, parts))  # Proposition 2: S is the fastest for its A
            if set(plan.cuts) | {L} == plan.activations:  # nothing is left out, so nothing is bare
                assert plan.latency == rounded_up(sum(Fraction(times[span]) for span in spans))


@pytest.mark.parametrize("seed", [1, 2])
def test_equals_a_mixed_integer_program(seed: int) -> None:
    network = mobilenet_v2()
    latency, importance = plausible_tables(network.spans(), network.flagged_spans(), seed)
    latency = with_bare(latency, lambda entry: entry.time * (0.6 + 0.05 * ((entry.span.i + entry.span.j) % 7)))
    frontier = solve(latency, importance, network=network)
    gaps = [(a.latency, b.latency) for a, b in pairwise(frontier.points) if b.latency - a.latency > 1e-3]
    assert len(gaps) >= 6
    for low, high in (gaps[n * (len(gaps) - 1) // 5] for n in range(6)):
        budget = (low + high) / 2
        time, value = milp_best(latency, importance, budget)
        plan = frontier.at(budget)
        assert plan.latency <= budget and time <= budget
        assert value <= plan.importance <= value + 1e-6  # as close as HiGHS comes
        assert latency.predict(network, plan) == plan.latency


def test_where_every_bare_time_is_the_time_nothing_changes() -> None:
    network = mobilenet_v2()
    instances = [plausible_tables(network.spans(), network.flagged_spans(), 3), *map(small_instance, range(200))]
    for latency, importance in instances:
        if len(latency.entries) < 100 and solved(latency, importance) is None:
            continue
        frontier = solve(latency, importance)
        same = solve(with_bare(latency, lambda entry: entry.time), importance)
        assert same.points == frontier.points
        assert tuple(replace(segment, bare=None) for segment in same.segments) == frontier.segments


def test_the_quick_look_at_many_candidates_knows_of_the_flag_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many labels that most candidates for L are sorted out by a sample. Without its activation the end takes half
    as long; with one it is worth more."""
    rng, L = random.Random(0), 40
    times = {(i, j): (j - i) ** 0.5 * rng.uniform(0.9, 1.1) for i, j in combinations(range(L + 1), 2)}
    values = {
        (i, j, 1, b): time + rng.uniform(0.0, 0.01) - 0.2 * (1 - b)
        for (i, j), time in times.items()
        for b in ((0, 1) if j == L else (1,))
    }
    latency = with_bare(latency_table(times), lambda entry: entry.time / 2 if entry.span.j == L else None)
    importance = importance_table(values)
    looked: list[int] = []

    def counted(units: Floats, importances: Floats) -> Ints:
        looked.append(len(units))
        return contenders(units, importances)

    monkeypatch.setattr(stage_two, "contenders", counted)
    quick = solve(latency, importance)
    assert max(looked) > stage_two.WORTHWHILE
    monkeypatch.setattr(stage_two, "WORTHWHILE", 10**9)
    assert solve(latency, importance) == quick
    assert {L in point.activations for point in quick.points} == {False, True}


def test_cheaper_bare_times_only_ever_help() -> None:
    faster = 0
    for seed in range(400):
        latency, importance = bare_instance(seed, cheaper=True)
        if (frontier := solved(latency, importance)) is None:
            continue
        for point in solve(*small_instance(seed)).points:
            found = [one for one in frontier.points if one.latency <= point.latency]
            assert found and found[-1].importance >= point.importance
            faster += min(one.latency for one in found if one.importance >= point.importance) < point.latency
    assert faster > 200


def test_an_activation_that_costs_more_than_it_is_worth_is_left_out_at_the_end() -> None:
    values = {(0, 1, 1, 0): 1.0, (0, 1, 1, 1): 2.0}
    table = with_bare(latency_table({(0, 1): 3.0}), lambda entry: 1.0)
    fast, good = solve(table, importance_table(values)).plans
    assert (fast.plan, fast.latency, fast.importance) == (Plan((), ()), 1.0, 1.0)
    assert (good.plan, good.latency, good.importance) == (Plan({1}, ()), 3.0, 2.0)


def test_a_cut_may_pay_only_without_its_activation() -> None:
    """(0, 1] and (1, 2] take 2 + 2 with an activation between, 0.5 + 2 without one, and 3 as one convolution."""
    times = {(0, 1): 2.0, (1, 2): 2.0, (0, 2): 3.0}
    values = {(0, 1, 1, 0): 0.0, (0, 1, 1, 1): 1.0, (1, 2, 0, 1): 0.0, (1, 2, 1, 1): 0.0, (0, 2, 1, 1): -1.0}
    assert [plan.cuts for plan in solve(latency_table(times), importance_table(values))] == [(), (1,)]
    table = with_bare(latency_table(times), lambda entry: 0.5 if entry.span == Span(0, 1) else None)
    fast, good = solve(table, importance_table(values)).plans
    assert (fast.plan, fast.latency, fast.latency_by_activations) == (Plan({2}, (1,)), 2.5, 3.0)
    assert (good.plan, good.latency, good.latency_by_activations) == (Plan({1, 2}, (1,)), 4.0, 4.0)
    assert [line.split()[-3] for line in str(fast).splitlines()[-2:]] == ["0.5", "2"]  # the column of milliseconds
    assert [line.split()[-3] for line in str(good).splitlines()[-2:]] == ["2", "2"]
    assert SolvedPlan.loads(fast.dumps()) == fast


def test_the_ablation_leaves_out_the_same_activations() -> None:
    """Between two activations as few spans as possible, the fastest choice of those, by trying all of them."""
    chains = 0
    for seed in range(400):
        latency, importance = bare_instance(seed)
        for point in solved(latency, importance) or ():
            ends = (0, *sorted(point.activations - {latency.depth}), latency.depth)
            ways = [fewest(latency, k, l, l in point.activations) for k, l in pairwise(ends)]
            chains += any(count > 1 for count, _ in ways)
            total = sum(time for _, time in ways)
            assert point.latency_by_activations == pytest.approx(float(total), rel=1e-12, abs=1e-12), f"seed {seed}"
    assert chains > 50


def fewest(latency: LatencyTable, k: int, l: int, active: bool) -> tuple[int, Fraction]:
    """How few spans lead from k to l, and the least sum of so many: all of them bare but an active last one."""
    times, bare = latency.times_if(True), latency.times_if(False)
    for count in range(1, l - k + 1):
        sums = []
        for inner in combinations(range(k + 1, l), count - 1):
            spans = [Span(i, j) for i, j in pairwise((k, *inner, l))]
            if all(span in times for span in spans):
                last = (times if active else bare)[spans[-1]]
                sums.append(sum((Fraction(bare[span]) for span in spans[:-1]), Fraction(last)))
        if sums:
            return count, min(sums)
    raise AssertionError("the frontier has a plan, so there is a way")


def rounded_up(exact: Fraction) -> float:
    near = float(exact)
    return near if Fraction(near) >= exact else math.nextafter(near, math.inf)
