"""From labels back to plans: A, S and B of every label at L, all of them at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from depthfold.core import Point, Position
from depthfold.solver.problem import Bools
from depthfold.solver.stage_two import Front
from depthfold.stage_one import Floats, Ints

Steps = tuple[Ints, Ints, Ints, Ints]  # one step per entry, from one activation to the next: plan, k, l, flag at l


def points(
    fronts: Mapping[Position, Front], I: Floats, S_opt: Ints, B_opt: Ints, T_A: Ints
) -> tuple[tuple[Point, ...], list[tuple[Position, Position]]]:
    """Return the plans of the frontier by rising latency, and the ends of all segments that they merge.

    D is a sum in floating point, so its last digit depends on the order. Here the importance of a plan is the exact sum
    of its entries, rounded once, and a plan that is not better than a faster one is left out.
    """
    end = fronts[len(I) - 1]
    steps = plan, k, l, b = _steps(fronts, end)
    shape = len(end.t), len(I)
    A = np.zeros(shape, dtype=bool)
    A[plan, l] = b == 1
    S, used = _follow_S(steps, S_opt, shape)
    B, importances = _follow_B(steps, B_opt, I, shape)
    along_A = np.zeros(shape[0], dtype=np.int64)
    np.add.at(along_A, plan, T_A[k, l, b])
    plans = zip(
        (t / 10**9 for t in end.t.tolist()),
        map(math.fsum, importances.tolist()),
        (t / 10**9 for t in along_A.tolist()),
        *map(_positions, (A, S, B)),
        strict=True,
    )
    front: list[Point] = []
    for ms, importance, ms_along_A, activations, cuts, boundaries in sorted(plans, key=lambda p: (p[0], -p[1])):
        if not front or importance > front[-1].importance:
            front.append(
                Point(
                    latency=ms,
                    importance=importance,
                    latency_by_activations=ms_along_A,
                    activations=activations,
                    cuts=cuts,
                    boundaries=boundaries,
                )
            )
    return tuple(front), [(i, j) for i, j in np.argwhere(used).tolist()]


def _steps(fronts: Mapping[Position, Front], end: Front) -> Steps:
    """Return every step of every plan from one activation to the next."""
    position = np.repeat(list(fronts), [len(front.t) for front in fronts.values()])
    parent = np.concatenate([front.parent for front in fronts.values()])
    flag = np.concatenate([front.a for front in fronts.values()])
    plan = np.arange(len(end.t))
    label = end.first + plan
    steps = []
    while plan.size:
        before = parent[label]
        k = position[before]
        steps.append((plan, k, position[label], flag[label]))
        plan, label = plan[k > 0], before[k > 0]
    plan, k, l, b = (np.concatenate(column) for column in zip(*steps, strict=True))
    return plan, k, l, b


def _follow_S(steps: Steps, S_opt: Ints, shape: tuple[int, int]) -> tuple[Bools, Bools]:
    """Return S, one row per plan, and the segments [i, j] that are used."""
    S, used = np.zeros(shape, dtype=bool), np.zeros((shape[1], shape[1]), dtype=bool)
    plan, k, l, b = steps
    S[plan, k] = True
    while plan.size:
        m = S_opt[k, l, b]
        used[m, l] = True
        S[plan, m] = True
        on = m > k
        plan, k, l = plan[on], k[on], m[on]
        b = np.zeros_like(l)  # there is no activation between k and l
    S[:, 0] = False
    return S, used


def _follow_B(steps: Steps, B_opt: Ints, I: Floats, shape: tuple[int, int]) -> tuple[Bools, Floats]:
    """Return B, one row per plan, and the importance of each block in the column where the block ends."""
    B, importances = np.zeros(shape, dtype=bool), np.zeros(shape)
    plan, k, l, b = steps
    while plan.size:
        m = B_opt[k, l, 1, b]
        on = m > k
        importances[plan, l] = I[m, l, np.where(on, 0, 1), b]
        B[plan, m] = True
        plan, k, l = plan[on], k[on], m[on]
        b = np.zeros_like(l)
    B[:, 0] = False
    return B, importances


def _positions(rows: Bools) -> Iterator[tuple[int, ...]]:
    """Yield the columns that are True, row by row."""
    columns = np.nonzero(rows)[1].tolist()
    ends = np.cumsum(rows.sum(axis=1)).tolist()
    return (tuple(columns[start:end]) for start, end in zip([0, *ends], ends, strict=False))
