"""Two independent references for the solver: exhaustive search and a mixed-integer program."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from fractions import Fraction

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from depthfold.core import ImportanceTable, LatencyTable

Plan = tuple[int, Fraction]  # picoseconds, importance


@functools.lru_cache(maxsize=10_000)
def rounded_up(ms: float) -> int:
    """A time in whole picoseconds, from the decimal number that it prints as."""
    return math.ceil(Fraction(repr(ms)) * 10**9)


def every_merging(latency: LatencyTable) -> dict[int, int]:
    """Every S as a set of bits, with the sum of its times with an activation, in picoseconds."""
    last = latency.depth
    starts = defaultdict(list)
    for span, (_, time) in latency.times.items():
        starts[span.i].append((span.j, rounded_up(time)))
    found: dict[int, int] = {}

    def walk(position: int, cuts: int, total: int) -> None:
        for end, time in starts[position]:
            if end == last:
                found[cuts] = total + time
            else:
                walk(end, cuts | 1 << end, total + time)

    walk(0, 0, 0)
    return found


def fastest_with(latency: LatencyTable, activations: int) -> int | None:
    """The least sum over every S that goes with these activations, in picoseconds: a span that ends where none of them
    is takes its time without one. None if there is no such S."""
    times, last = latency.times, latency.depth
    totals: list[int] = []

    def walk(position: int, total: int) -> None:
        if position == last:
            totals.append(total)
        for span in times:
            if span.i == position and not any(activations >> p & 1 for p in span.inner):
                walk(span.j, total + rounded_up(times[span][activations >> span.j & 1]))

    walk(0, 0)
    return min(totals, default=None)


def every_blocking(importance: ImportanceTable) -> dict[int, Fraction]:
    """Every A (L included where its flag is 1), with the best exact sum over every B that goes with it."""
    last = importance.depth
    starts = defaultdict(list)
    for span, value in importance.importances.items():
        starts[span.i, span.a].append((span.j, span.b, Fraction(value)))
    best: dict[int, Fraction] = {}

    def walk(position: int, flag: bool, activations: int, total: Fraction) -> None:
        for end, b, value in starts[position, flag]:
            chosen = activations | 1 << end if b else activations
            if end < last:
                walk(end, b, chosen, total + value)
            elif chosen not in best or best[chosen] < total + value:
                best[chosen] = total + value

    walk(0, True, 0, Fraction(0))
    return best


def exhaustive_frontier(latency: LatencyTable, importance: ImportanceTable) -> list[Plan]:
    """Picoseconds and exact importance of every plan that no other plan beats, over all A, B and S; empty if none."""
    one_time = all(without == with_one for without, with_one in latency.times.values())
    plans = _plans(latency, importance) if one_time else _plans_by_A(latency, importance)
    front: list[Plan] = []
    for time, value in sorted(plans, key=lambda plan: (plan[0], -plan[1])):
        if not front or value > front[-1][1]:
            front.append((time, value))
    return front


def _plans(latency: LatencyTable, importance: ImportanceTable) -> list[Plan]:
    """The fastest plan of each A, if no time depends on A."""
    mergings = sorted(every_merging(latency).items(), key=lambda item: item[1])
    inner = (1 << latency.depth) - 1  # L is not a cut
    plans = []
    for activations, value in every_blocking(importance).items():
        for cuts, time in mergings:
            if not activations & inner & ~cuts:
                plans.append((time, value))
                break
    return plans


def _plans_by_A(latency: LatencyTable, importance: ImportanceTable) -> list[Plan]:
    best = ((fastest_with(latency, A), value) for A, value in every_blocking(importance).items())
    return [(time, value) for time, value in best if time is not None]


def milp_best(latency: LatencyTable, importance: ImportanceTable, budget: float) -> tuple[float, float]:
    """Latency and importance of the best plan under the budget, by HiGHS.

    A path of spans for S, each with an activation at its end or without, a path of flagged blocks for B, and: where
    B's path passes an activation, S's path has a span that ends with one, and nowhere else.
    """
    values, L = importance.importances, latency.depth
    spans = [(span, flag) for flag in (True, False) for span in latency.times]
    times = [latency.times[span][flag] for span, flag in spans]
    blocks = list(values)
    rows: list[tuple[int, int, float]] = []
    low: list[float] = []
    high: list[float] = []

    def constrain(terms: dict[int, float], at_least: float, at_most: float) -> None:
        rows.extend((len(low), column, factor) for column, factor in terms.items())
        low.append(at_least)
        high.append(at_most)

    def column(n: int) -> int:
        return len(spans) + n

    for p in range(1, L + 1):
        activation = {column(n): 1.0 for n, f in enumerate(blocks) if (f.j, f.b) == (p, True)}
        active = {n: -1.0 for n, (s, flag) in enumerate(spans) if s.j == p and flag}
        constrain(activation | active, 0.0, 0.0)
    for p in range(L):
        out_of = {n: 1.0 for n, (s, _) in enumerate(spans) if s.i == p}
        constrain(out_of | {n: -1.0 for n, (s, _) in enumerate(spans) if s.j == p}, float(p == 0), float(p == 0))
        for flag in (False, True):
            out = {column(n): 1.0 for n, f in enumerate(blocks) if (f.i, f.a) == (p, flag)}
            into = {column(n): -1.0 for n, f in enumerate(blocks) if (f.j, f.b) == (p, flag)}
            source = float((p, flag) == (0, True))
            constrain(out | into, source, source)
    constrain(dict(enumerate(times)), 0.0, budget)

    row, col, factor = zip(*rows, strict=True)
    size = len(spans) + len(blocks)
    objective = np.concatenate([np.zeros(len(spans)), -np.array(list(values.values()))])
    result = milp(
        objective,
        integrality=np.ones(size),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(coo_array((factor, (row, col)), shape=(len(low), size)).tocsr(), low, high),
        options={"mip_rel_gap": 0.0},
    )
    assert result.success, result.message
    chosen = result.x > 0.5
    time = math.fsum(t for t, x in zip(times, chosen[: len(spans)], strict=True) if x)
    return time, math.fsum(v for v, x in zip(values.values(), chosen[len(spans) :], strict=True) if x)
