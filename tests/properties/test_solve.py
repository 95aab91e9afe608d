"""The two propositions of Section 4.4, and budgets, on random tables."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from depthfold.core import Budget, Frontier, LatencyTable, Span
from depthfold.errors import BudgetError
from depthfold.solver import solve
from oracle import every_blocking, every_merging, rounded_up
from structures import mobilenet_v2
from tables import plausible_tables, small_instance


def solved(seed: int) -> tuple[LatencyTable, Frontier, dict[int, int], dict[int, Fraction]] | None:
    """A random instance with every S and every A there is; None if it has no plan."""
    latency, importance = small_instance(seed)
    mergings, blockings = every_merging(latency), every_blocking(importance)
    inner = (1 << latency.depth) - 1
    if not any(not A & inner & ~S for A in blockings for S in mergings):
        return None
    return latency, solve(latency, importance), mergings, blockings


@given(seed=st.integers(10_000, 10**9), part=st.floats(0.001, 1.2))
def test_proposition_1_a_plan_is_optimal_for_its_budget(seed: int, part: float) -> None:
    found = solved(seed)
    if found is None:
        return
    latency, frontier, mergings, blockings = found
    budget = part * max(mergings.values()) / 1e9 or 1e-3
    inner = (1 << latency.depth) - 1
    allowed = [
        value
        for A, value in blockings.items()
        if any(not A & inner & ~S and time <= Fraction(repr(budget)) * 10**9 for S, time in mergings.items())
    ]
    try:
        plan = frontier.at(Budget.milliseconds(budget))
    except BudgetError:
        assert not allowed
    else:
        assert plan.importance == float(max(allowed))


@given(seed=st.integers(10_000, 10**9))
def test_proposition_2_S_is_the_fastest_for_its_A(seed: int) -> None:
    found = solved(seed)
    if found is None:
        return
    latency, frontier, mergings, _ = found
    for solved_plan in frontier:
        plan = solved_plan.plan
        A = sum(1 << p for p in plan.activations if p < latency.depth)
        S = sum(1 << p for p in plan.cuts)
        assert mergings[S] == min(time for cuts, time in mergings.items() if not A & ~cuts)


def test_no_plan_exceeds_its_budget_in_exact_arithmetic() -> None:
    """10,000 random budgets of every kind, on tables of MobileNetV2's structure and on small ones with ties."""
    rng = random.Random(0)
    network = mobilenet_v2()
    frontiers = [plausible_tables(network.spans(), network.flagged_spans(), seed) for seed in range(5)]
    frontiers += [tables for tables in map(small_instance, range(100)) if tables[0].original][:45]
    met = 0
    for latency, importance in frontiers:
        frontier, times = solve(latency, importance), latency.times
        sums = {
            point: sum(rounded_up(times[Span(i, j)][1]) for i, j in pairwise((0, *point.cuts, frontier.depth)))
            for point in frontier.points
        }
        for _ in range(10_000 // len(frontiers)):
            budget, limit = random_budget(rng, frontier)
            best = [point for point, total in sums.items() if total <= limit * 10**9]
            try:
                plan = frontier.at(budget)
            except BudgetError:
                assert not best
                continue
            met += 1
            assert plan.importance == best[-1].importance
            assert Fraction(repr(plan.latency)) <= limit and sums[best[-1]] <= limit * 10**9
            assert plan.plan.cuts == best[-1].cuts
    assert len(frontiers) == 50 and met > 5_000


def random_budget(rng: random.Random, frontier: Frontier) -> tuple[Budget, Fraction]:
    """A budget and its exact milliseconds: often the latency of a plan, or the float just below it."""
    original = frontier.original
    assert original is not None
    latency = rng.choice(frontier.points).latency or 0.5
    match rng.randrange(4):
        case 0:
            value = latency * rng.choice((1.0, 1.0 - 2**-53))
            return Budget.milliseconds(value), Fraction(repr(value))
        case 1:
            value = rng.uniform(0.01, 1.2) * original
            return Budget.milliseconds(value), Fraction(repr(value))
        case 2:
            share = round(rng.uniform(0.1, 1.0), 3)
            return Budget.share(share), Fraction(str(share)) * Fraction(repr(original))
        case _:
            factor = round(rng.uniform(0.9, 4.0), 2)
            return Budget.parse(f"{factor}x"), Fraction(repr(original)) / Fraction(str(factor))
