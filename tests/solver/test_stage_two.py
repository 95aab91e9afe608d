from __future__ import annotations

import warnings
from itertools import pairwise

import numpy as np
import pytest

from depthfold.core import FlaggedSpan, Frontier, ImportanceTable, LatencyTable, Span
from depthfold.solver import solve
from depthfold.solver.arrays import lattice_exponent, on_lattice
from depthfold.solver.stage_two import WORTHWHILE, undominated
from structures import latency_table, mobilenet_v2, plausible_tables, small_instance


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
    kept = undominated(latency, importance)
    found = list(zip(latency[kept].tolist(), importance[kept].tolist(), strict=True))
    assert found == front_by_definition(latency, importance)


def test_equal_points_are_represented_by_the_first() -> None:
    assert undominated(np.array([2.0, 1.0, 1.0, 1.0]), np.array([5.0, 3.0, 5.0, 5.0])).tolist() == [2]


def test_sums_on_the_lattice_are_exact_and_never_too_small() -> None:
    table = np.full((201, 201), np.inf)
    table[:200, 200] = np.random.default_rng(0).uniform(0, 1e-3, 200) * 10.0 ** np.arange(-100, 100)
    exponent = lattice_exponent(table)
    units = on_lattice(table, exponent, np.ceil)
    finite = units[np.isfinite(units)]
    assert finite.sum() < 2.0**52 and (finite == np.floor(finite)).all()
    assert all(unit >= time for unit, time in zip(np.ldexp(finite, -exponent), table[:200, 200], strict=True))


@pytest.mark.parametrize("largest", [0.0, 5e-324, 1e-300, 1.0, 1e300])
def test_the_lattice_takes_numbers_of_any_size(largest: float) -> None:
    table = np.array([[np.inf, largest], [np.inf, np.inf]])
    units = on_lattice(table, lattice_exponent(table), np.ceil)
    assert np.isfinite(units[0, 1]) and units[0, 1] <= 2.0**52


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
        assert plan.importance - rough.lost - 1e-12 <= found.importance <= plan.importance


def test_thinning_is_never_silent() -> None:
    network = mobilenet_v2()
    latency, importance = plausible_tables(network.spans(), network.flagged_spans(), 5)
    with pytest.warns(RuntimeWarning, match=r"thinned to 10 labels .* up to .* of importance below the best one"):
        frontier = solve(latency, importance, max_labels=10)
    assert f"thinned: at most {frontier.lost:.4g} of importance lost at any budget" in str(frontier)


def test_the_bound_holds_on_small_instances() -> None:
    for seed in range(200):
        latency, importance = small_instance(seed)
        if not np.isfinite(latency.original or np.inf):
            continue
        exact, rough = solve(latency, importance), thinned(latency, importance, 2)
        for plan in exact.points:
            assert rough.at(plan.latency or 1e-9).importance >= plan.importance - rough.lost - 1e-12


def test_plans_with_the_same_segments_in_another_order_are_equal() -> None:
    """0.1 + 0.2 + 0.3 depends on the order in floating point; the frontier must not see a gain in that."""
    times = {(0, 1): 0.1, (1, 2): 0.2, (2, 3): 0.3, (3, 4): 0.3, (4, 5): 0.2, (5, 6): 0.1}
    spans = [Span(*ends) for ends in times]
    _, importance = plausible_tables(spans, [FlaggedSpan(s.i, s.j, True, True) for s in spans], 0)
    frontier = solve(latency_table(times), importance)
    assert len(frontier) == 1
    assert all(one.latency < two.latency for one, two in pairwise(frontier.points))
