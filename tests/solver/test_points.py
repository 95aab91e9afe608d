"""Labels as plans again: the sums that a plan reports."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

from depthfold.core import Span
from depthfold.solver import solve
from oracle import rounded_up
from tables import importance_table, latency_table, small_instance


def test_of_two_plans_with_the_same_latency_the_better_stays() -> None:
    """Exactly the two latencies differ by less than a picosecond, and so the importances decide."""
    u = 2.0**-60
    times = {(0, 1): 1.0, (1, 2): u, (0, 2): 1.0 + 1e-9, (2, 3): u, (1, 3): 3 * u, (0, 3): 9.0}
    blocks = {(0, 1): 0.0, (1, 2): 0.0, (0, 2): 0.0, (2, 3): 0.0, (1, 3): 1.0, (0, 3): 0.0}
    frontier = solve(latency_table(times), importance_table({(*ends, 1, 1): v for ends, v in blocks.items()}))
    # (0, 1] + (1, 3] takes 1 ms + 3u, rounded up to 1 ms + 1 ps, with importance 1.
    (point,) = frontier.points
    assert (point.latency, point.importance, point.activations) == (1.0 + 1e-9, 1.0, (1, 3))
    assert point.cuts == (1,)


def test_plan_that_only_rounding_finds_better_is_left_out() -> None:
    """In the solver's order (0.1 + 0.2) + 0.3 is 0.6000000000000001, and the faster plan has the same importance."""
    values = {(0, 1, 1, 1): 0.1, (1, 2, 1, 1): 0.2, (2, 3, 1, 1): 0.3, (0, 3, 1, 1): 0.6}
    values |= {(0, 2, 1, 1): -1.0, (1, 3, 1, 1): -1.0}
    assert 0.1 + 0.2 + 0.3 > 0.6 == math.fsum((0.1, 0.2, 0.3))
    times = {(i, j): 1.0 for i in range(3) for j in range(i + 1, 4)}
    frontier = solve(latency_table(times), importance_table(values))
    assert [(point.latency, point.importance) for point in frontier.points] == [(1.0, 0.6)]


def test_latency_by_activations_is_never_below_latency() -> None:
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
                exact = sum(rounded_up(time) for _, time in whole)
                assert Fraction(repr(point.latency_by_activations)) == Fraction(exact, 10**9)
    assert more > 20
