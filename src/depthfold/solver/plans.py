"""From labels back to plans: A, S, B and the drops of every label at L, all of them at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from depthfold.core import NOTHING, Drops, Point, Position
from depthfold.solver.edges import Bools, StageOne, UsedSegment
from depthfold.solver.stage_two import Front
from depthfold.stage_one import Ints

Steps = list[tuple[Ints, Ints]]  # plans, each once, and an edge of each


def points(
    fronts: Mapping[Position, Front], stage_one: StageOne, L: Position, drops: Callable[[int], Drops] | None
) -> tuple[tuple[Point, ...], list[UsedSegment]]:
    """Return the plans of the frontier by rising latency, and all segments that they merge.

    D is a sum in floating point, so its last digit depends on the order. Here the importance of a plan is the exact sum
    of its entries, rounded once, and a plan that is not better than a faster one is left out. `drops` turns bits into
    Drops; None if nothing is dropped.
    """
    end, edges = fronts[L], stage_one.edges
    steps = _steps(fronts, end)
    used = np.unique(np.concatenate([edge for _, edge in steps]))
    ways = stage_one.ways(used)
    shape = len(end.t), L + 1
    A, S, B, importances = (np.zeros(shape, dtype=kind) for kind in (bool, bool, bool, float))
    along_A, masks = np.zeros(shape[0], dtype=np.int64), [0] * shape[0]
    for plan, edge in steps:
        row = np.searchsorted(used, edge)
        A[plan, edges.l[edge]] = edges.b[edge] == 1
        S[plan] |= ways.cuts[row]
        B[plan] |= ways.boundaries[row]
        importances[plan] += ways.importances[row]
        along_A[plan] += ways.along_A[row]
        for one, own in zip(plan.tolist(), row.tolist(), strict=True) if drops else ():
            masks[one] |= ways.dropped[own]
    S[:, 0] = B[:, 0] = False
    plans = zip(
        (t / 10**9 for t in end.t.tolist()),
        map(math.fsum, importances.tolist()),
        (t / 10**9 for t in along_A.tolist()),
        *map(_positions, (A, S, B)),
        masks,
        strict=True,
    )
    front: list[Point] = []
    for ms, importance, ms_along_A, activations, cuts, boundaries, mask in sorted(plans, key=lambda p: (p[0], -p[1])):
        if not front or importance > front[-1].importance:
            front.append(
                Point(
                    latency=ms,
                    importance=importance,
                    latency_by_activations=ms_along_A,
                    activations=activations,
                    cuts=cuts,
                    boundaries=boundaries,
                    dropped=drops(mask) if drops and mask else NOTHING,
                )
            )
    return tuple(front), sorted(ways.segments)


def _steps(fronts: Mapping[Position, Front], end: Front) -> Steps:
    """Return every step of every plan from one activation to the next, the last steps first."""
    parent = np.concatenate([front.parent for front in fronts.values()])
    edge = np.concatenate([front.edge for front in fronts.values()])
    plan = np.arange(len(end.t))
    label = end.first + plan
    steps = []
    while plan.size:
        steps.append((plan, edge[label]))
        label = parent[label]
        on = label > 0  # 0 is the label of position 0
        plan, label = plan[on], label[on]
    return steps


def _positions(rows: Bools) -> Iterator[tuple[int, ...]]:
    """Yield the columns that are True, row by row."""
    columns = np.nonzero(rows)[1].tolist()
    ends = np.cumsum(rows.sum(axis=1)).tolist()
    return (tuple(columns[start:end]) for start, end in zip([0, *ends], ends, strict=False))
