"""Algorithms 2 and 4: labels, and sums in whole picoseconds."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import pytest

from depthfold.core import Budget
from depthfold.core.latency_table import picoseconds
from depthfold.solver import solve
from depthfold.solver.stage_two import undominated
from oracle import rounded_up
from tables import importance_table, latency_table


def front_by_definition(latency: np.ndarray, importance: np.ndarray) -> list[tuple[float, float]]:
    points = set(zip(latency.tolist(), importance.tolist(), strict=True))
    ordered = sorted(points, key=lambda point: (point[0], -point[1]))
    front: list[tuple[float, float]] = []
    for point in ordered:
        if not front or point[1] > front[-1][1]:
            front.append(point)
    return front


@pytest.mark.parametrize("size", [1, 2, 100, 8_001, 24_000])
@pytest.mark.parametrize("spread", [3, 1000, 2**45])
@pytest.mark.parametrize(("seed", "offset"), [(0, 0), (1, 10**18)])
def test_undominated_equals_the_definition(size: int, spread: int, seed: int, offset: int) -> None:
    rng = np.random.default_rng(seed)
    latency = rng.integers(0, spread, size) + offset
    importance = (latency - offset) * rng.choice((0.0, 1.0)) + rng.integers(0, spread, size)
    kept = undominated(latency, importance)
    found = list(zip(latency[kept].tolist(), importance[kept].tolist(), strict=True))
    assert found == front_by_definition(latency, importance)


def test_equal_points_are_represented_by_the_first() -> None:
    latency = np.array([2, 1, 1, 1])
    assert undominated(latency, np.array([5.0, 3.0, 5.0, 5.0])).tolist() == [2]


def test_a_picosecond_decides_at_any_size() -> None:
    latency = np.array([2**60 + 2, 2**60 + 1, 2**60 + 3])  # equal as floats
    assert undominated(latency, np.array([2.0, 2.0, 3.0])).tolist() == [1, 2]


def test_decimal_times_are_exact() -> None:
    """In binary 0.1 + 0.2 is more than 0.3. As picoseconds the two sums are equal, and the unsplit span stays."""
    times = {(0, 1): 0.1, (1, 2): 0.2, (0, 2): 0.3}
    values = {(0, 1, 1, 1): 0.0, (1, 2, 1, 1): 0.0, (0, 2, 1, 1): 0.0}
    frontier = solve(latency_table(times), importance_table(values))
    assert [(plan.latency, plan.plan.cuts) for plan in frontier] == [(0.3, ())]
    assert frontier.at("0.3ms").latency == 0.3
    more = solve(latency_table(times), importance_table({**values, (1, 2, 1, 1): 1.0}))
    assert [(plan.latency, plan.plan.cuts) for plan in more] == [(0.3, (1,))]


def test_order_of_a_sum_does_not_matter() -> None:
    """A decides the order in which the solver adds 0.1, 0.2 and 0.3 six times: there is one latency."""
    times = {(l - 1, l): time for l, time in enumerate((0.1, 0.2, 0.3, 0.3, 0.2, 0.1), start=1)}
    blocks = {(i, j, 1, 1): 0.5 * i for i in range(6) for j in range(i + 1, 7)}
    spans = {ends[:2]: 9.0 for ends in blocks} | times
    frontier = solve(latency_table(spans), importance_table(blocks))
    assert len(frontier) == 1


def test_near_ties_at_float_resolution_never_exceed_a_budget() -> None:
    """Times that differ in the last bit of a float, and budgets next to the latencies of plans."""
    rng = random.Random(0)
    met = 0
    for _ in range(150):
        depth, base = rng.randint(2, 6), rng.choice((0.1, 1 / 3, 1.0, 123.456, 9e5))
        spans = [(i, j) for i in range(depth) for j in range(i + 1, depth + 1)]
        times = {ends: _nudged(base * (ends[1] - ends[0]), rng.randint(-2, 2)) for ends in spans}
        values = {(*ends, 1, 1): rng.uniform(0.0, 1.0) for ends in spans}
        frontier = solve(latency_table(times), importance_table(values))
        for point in frontier.points:
            ends = list(zip((0, *point.cuts), (*point.cuts, depth), strict=True))
            total = sum(Fraction(repr(times[pair])) for pair in ends)
            assert total <= Fraction(repr(point.latency)) < total + len(ends) * Fraction(1, 10**9)
            for budget in (_nudged(point.latency, n) for n in (-1, 0, 1)):
                affordable = [p for p in frontier.points if p.latency <= budget]
                if affordable:
                    met += 1
                    found = frontier.at(Budget.milliseconds(budget))
                    assert found.latency <= budget
                    assert found.importance == affordable[-1].importance
    assert met > 300


def _nudged(value: float, steps: int) -> float:
    """The float that lies so many floats above or below."""
    for _ in range(abs(steps)):
        value = float(np.nextafter(value, np.inf if steps > 0 else -np.inf))
    return min(value, 1e6)


@pytest.mark.parametrize("digits", [1, 9, 17])
def test_times_are_rounded_up_by_less_than_a_picosecond(digits: int) -> None:
    rng = random.Random(digits)
    for _ in range(3_000):
        time = min(round(10.0 ** rng.uniform(-12, 6), digits), 1e6)
        ps = picoseconds(time)
        assert ps == rounded_up(time)
        assert 0 <= ps - Fraction(repr(time)) * 10**9 < 1
        assert ps / 1e9 >= time > (ps - 1) / 1e9
        if digits <= 9:
            assert ps / 1e9 == time
    assert picoseconds(5e-324) == 1 and picoseconds(0.0) == 0
