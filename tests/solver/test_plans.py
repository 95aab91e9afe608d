"""The last digit: what labels become when they are plans again."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np

from depthfold.core import Span
from depthfold.solver import solve
from depthfold.solver.arrays import Exact, lattice_exponent
from tables import importance_table, latency_table, small_instance


def test_what_is_below_a_unit_is_rounded_up() -> None:
    """A tiny entry has more bits below a unit than the rest can hold; down, a budget could be overrun."""
    tiny = math.nextafter(1e-20, 1)
    table = np.array([[np.inf, 1.0], [np.inf, tiny]])
    exact, unit = Exact.of(table), Fraction(2) ** -lattice_exponent(table)
    step = unit / 2**52
    found = (Fraction(exact.units[1, 1]) + Fraction(exact.rest[1, 1])) * unit
    assert Fraction(tiny) < found < Fraction(tiny) + step
    assert (found / step).denominator == 1


def test_two_plans_with_the_same_rounded_latency() -> None:
    """Exactly they differ, and so do their importances; as floats both take the same time: the better one stays."""
    u = 2.0**-60
    times = {(0, 1): 1.0, (1, 2): u, (0, 2): 1.0, (2, 3): u, (1, 3): 3 * u, (0, 3): 9.0}
    blocks = {(0, 1): 0.0, (1, 2): 0.0, (0, 2): 0.0, (2, 3): 0.0, (1, 3): 1.0, (0, 3): 0.0}
    frontier = solve(latency_table(times), importance_table({(*ends, 1, 1): v for ends, v in blocks.items()}))
    # (0, 2] + (2, 3] takes 1 + u and is worth 0; (0, 1] + (1, 2] + (2, 3] takes 1 + 2u and is worth 1 with A = {1}.
    (point,) = frontier.points
    assert (point.latency, point.importance, point.activations) == (math.nextafter(1.0, 2.0), 1.0, (1, 3))
    assert point.cuts == (1, 2)


def test_a_plan_that_only_the_lattice_finds_better() -> None:
    """On the lattice two blocks round up to 2 units, one block rounds down to 1; in truth they are 1.125 and 1.375."""
    unit = 2.0**-50
    merged, half = 0.75 + 1.375 * unit, 0.375 + 0.5625 * unit
    values = {(0, 2, 1, 1): merged, (0, 1, 1, 1): half, (1, 2, 1, 1): half}
    table = np.array([[[[-np.inf, half, merged], [-np.inf, -np.inf, half], [-np.inf] * 3]]])
    assert lattice_exponent(table) == 50
    assert np.rint(merged / unit) < 2 * np.rint(half / unit)
    assert merged > 2 * half
    frontier = solve(latency_table({(0, 2): 1.0, (0, 1): 1.0, (1, 2): 1.0}), importance_table(values))
    assert [point.importance for point in frontier.points] == [merged]


def test_latency_by_activations_is_never_below_latency() -> None:
    """Both are sums of the same kind, rounded up in the same way."""
    more = 0
    for seed in range(400):
        latency, importance = small_instance(seed)
        if latency.original is None:
            continue
        times = latency.times
        for point in solve(latency, importance).points:
            assert point.latency_by_activations >= point.latency
            more += point.latency_by_activations > point.latency
            ends = (0, *(p for p in point.activations if p < latency.depth), latency.depth)
            whole = [times.get(Span(i, j)) for i, j in pairwise(ends)]
            if None not in whole:
                exact = sum(map(Fraction, whole))
                assert math.nextafter(point.latency_by_activations, -1) < exact <= point.latency_by_activations
    assert more > 20
