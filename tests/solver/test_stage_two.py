from __future__ import annotations

import math
import random
import warnings
from fractions import Fraction

import numpy as np
import pytest

from depthfold.core import Frontier, ImportanceTable, LatencyTable
from depthfold.solver import solve
from depthfold.solver.arrays import Exact, lattice_exponent
from depthfold.solver.stage_two import WORTHWHILE, contenders, undominated
from depthfold.support.text import at_most
from oracle import exhaustive_frontier
from structures import mobilenet_v2
from tables import importance_table, latency_table, plausible_tables, small_instance


def front_by_definition(latency: np.ndarray, importance: np.ndarray) -> list[tuple[float, float]]:
    points = set(zip(latency.tolist(), importance.tolist(), strict=True))
    ordered = sorted(points, key=lambda point: (point[0], -point[1]))
    front: list[tuple[float, float]] = []
    for point in ordered:
        if not front or point[1] > front[-1][1]:
            front.append(point)
    return front


@pytest.mark.parametrize("size", [1, 2, 100, WORTHWHILE + 1, 3 * WORTHWHILE])
@pytest.mark.parametrize("spread", [3, 1000, 2**45])
@pytest.mark.parametrize("seed", [0, 1])
def test_undominated_equals_the_definition(size: int, spread: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    latency = rng.integers(0, spread, size).astype(float)
    importance = latency * rng.choice((0.0, 1.0)) + rng.integers(0, spread, size)
    kept = contenders(latency, importance)
    kept = kept[undominated(Exact(latency[kept], np.zeros(len(kept))), importance[kept])]
    found = list(zip(latency[kept].tolist(), importance[kept].tolist(), strict=True))
    assert found == front_by_definition(latency, importance)


def test_nobody_is_rejected_when_everybody_is_undominated() -> None:
    latency = np.sort(np.random.default_rng(0).choice(2**45, 3 * WORTHWHILE, replace=True).astype(float))
    assert len(contenders(latency, latency)) == len(latency)


def test_equal_points_are_represented_by_the_first() -> None:
    latency = Exact(np.array([2.0, 1.0, 1.0, 1.0]), np.zeros(4))
    assert undominated(latency, np.array([5.0, 3.0, 5.0, 5.0])).tolist() == [2]


def test_the_rest_decides_between_equal_units() -> None:
    latency = Exact(np.array([1.0, 1.0, 1.0]), np.array([0.5, 0.25, 0.75]))
    assert undominated(latency, np.array([2.0, 2.0, 3.0])).tolist() == [1, 2]


@pytest.mark.parametrize("digits", [1, 17])
def test_sums_are_exact(digits: int) -> None:
    rng = random.Random(digits)
    times = [round(10.0 ** rng.uniform(-6, 2), digits) for _ in range(200)]
    table = np.full((201, 201), np.inf)
    table[:200, 200] = times
    total, exact = Exact(np.zeros(1), np.zeros(1)), Exact.of(table)
    for n in rng.sample(range(200), 200):
        total += exact[n : n + 1, 200]
    unit = Fraction(2) ** -lattice_exponent(table)
    assert (Fraction(total.units[0]) + Fraction(total.rest[0])) * unit == sum(map(Fraction, times))


@pytest.mark.parametrize("largest", [0.0, 5e-324, 1e-300, 1.0, 1e300])
def test_the_lattice_takes_numbers_of_any_size(largest: float) -> None:
    units = Exact.of(np.array([[np.inf, largest], [np.inf, np.inf]])).units
    assert np.isinf(units[0, 0]) and 0 <= units[0, 1] <= 2.0**52


def thinned(latency: LatencyTable, importance: ImportanceTable, max_labels: int) -> Frontier:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return solve(latency, importance, max_labels=max_labels)


@pytest.mark.parametrize("max_labels", [1, 2, 5, 20, 100])
def test_thinning_loses_no_more_than_it_says(max_labels: int) -> None:
    network = mobilenet_v2()
    latency, importance = plausible_tables(network.spans(), network.flagged_spans(), 5)
    exact, rough = solve(latency, importance), thinned(latency, importance, max_labels)
    assert exact.exact and not rough.exact
    assert len(rough) <= max_labels
    assert rough.points[0].latency == exact.points[0].latency  # every budget that can be met is met
    for plan in exact.points:
        found = rough.at(plan.latency)
        assert found.latency <= plan.latency
        assert Fraction(plan.importance) - Fraction(rough.lost) <= Fraction(found.importance)
        assert found.importance <= plan.importance


def test_thinning_is_never_silent() -> None:
    network = mobilenet_v2()
    latency, importance = plausible_tables(network.spans(), network.flagged_spans(), 5)
    with pytest.warns(RuntimeWarning, match=r"thinned to 10 labels .* up to .* of importance below the best one"):
        frontier = solve(latency, importance, max_labels=10)
    assert f"thinned: at most {at_most(frontier.lost)} of importance lost at any budget" in str(frontier)


def test_the_bound_is_true_to_the_last_bit() -> None:
    """Against the exact importance of the best plan: the rounding of the lattice is part of the bound."""
    count = 0
    for seed in range(10_000, 10_500):
        latency, importance = small_instance(seed)
        best = exhaustive_frontier(latency, importance)
        rough = thinned(latency, importance, 2) if best else None
        if rough is None or rough.exact:
            continue
        count += 1
        for time, value in best:
            limit = math.nextafter(float(time), math.inf)
            found = max(point.importance for point in rough.points if point.latency <= limit)
            assert Fraction(found) >= value - Fraction(rough.lost), f"seed {seed}"
    assert count > 100


def test_what_is_printed_as_a_bound_is_one() -> None:
    assert [at_most(value) for value in (0.45840001, 1.0, 123456.7)] == ["0.4585", "1", "1.235e+05"]


def test_the_bound_holds_on_small_instances() -> None:
    for seed in range(200):
        latency, importance = small_instance(seed)
        if not np.isfinite(latency.original or np.inf):
            continue
        exact, rough = solve(latency, importance), thinned(latency, importance, 2)
        for plan in exact.points:
            found = rough.at(plan.latency or 1e-9)
            assert Fraction(found.importance) >= Fraction(plan.importance) - Fraction(rough.lost)


def test_decimal_tables_are_kept_to_the_last_bit() -> None:
    """0.1 + 0.2 is a little more than 0.3 and must not stand for it: at a budget of 0.3 only one of them fits."""
    times = {(0, 1): 0.1, (1, 2): 0.2, (0, 2): 0.3}
    values = {(0, 1, 1, 1): 0.0, (1, 2, 1, 1): 0.0, (0, 2, 1, 1): 0.0}
    assert solve(latency_table(times), importance_table(values)).at(0.3).cuts == ()
    more = {**values, (1, 2, 1, 1): 1.0}
    assert [plan.cuts for plan in solve(latency_table(times), importance_table(more))] == [(), (1,)]


def test_the_order_of_a_sum_does_not_matter() -> None:
    """Six times 0.1, 0.2 and 0.3 in any order, and A decides the order in which the solver sums: one latency."""
    times = {(l - 1, l): time for l, time in enumerate((0.1, 0.2, 0.3, 0.3, 0.2, 0.1), start=1)}
    blocks = {(i, j, 1, 1): 0.5 * i for i in range(6) for j in range(i + 1, 7)}
    spans = {ends[:2]: 9.0 for ends in blocks} | times
    frontier = solve(latency_table(spans), importance_table(blocks))
    assert len(frontier) == 1
