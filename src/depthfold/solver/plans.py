"""From labels back to plans: A, S, B and the drops of every label at L, all of them at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from depthfold.core import NOTHING, Drops, Point, Position
from depthfold.solver.edges import StageOne, UsedSegment
from depthfold.solver.stage_two import Front
from depthfold.stage_one import Ints


def points(
    fronts: Mapping[Position, Front], stage_one: StageOne, L: Position, drops: Callable[[int], Drops] | None
) -> tuple[tuple[Point, ...], list[UsedSegment]]:
    """Return the plans of the frontier by rising latency, and all segments that they merge.

    D is a sum in floating point, so its last digit depends on the order. Here the importance of a plan is the exact sum
    of its entries, rounded once, and a plan that is not better than a faster one is left out. `drops` turns bits into
    Drops; None if nothing is dropped.
    """
    end, edges = fronts[L], stage_one.edges
    plan, edge = _steps(fronts, end)
    used, row = np.unique(edge, return_inverse=True)
    found = stage_one.plans(used)
    shape = len(end.t), L + 1
    A, S, B, importances = (np.zeros(shape, dtype=kind) for kind in (bool, bool, bool, float))
    A[plan, edges.l[edge]] = edges.b[edge] == 1
    step, item = found.cuts.of_each(row)
    S[plan[step], found.cuts.at[item]] = True
    step, item = found.boundaries.of_each(row)
    B[plan[step], found.boundaries.at[item]] = True
    importances[plan[step], found.ends[item]] = found.importances[item]
    along_A, masks = np.zeros(shape[0], dtype=np.int64), [0] * shape[0]
    np.add.at(along_A, plan, found.along_A[row])
    for one, own in zip(plan.tolist(), row.tolist(), strict=True) if drops else ():
        masks[one] |= found.dropped[own]
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
    return tuple(front), sorted(found.segments)


def _steps(fronts: Mapping[Position, Front], end: Front) -> tuple[Ints, Ints]:
    """Return every step of every plan from one activation to the next: the number of the plan, and of the edge."""
    parent = np.concatenate([front.parent for front in fronts.values()])
    edge = np.concatenate([front.edge for front in fronts.values()])
    plan = np.arange(len(end.t))
    label = end.first + plan
    plans, edges = [], []
    while plan.size:
        plans.append(plan)
        edges.append(edge[label])
        label = parent[label]
        on = label > 0  # 0 is the label of position 0
        plan, label = plan[on], label[on]
    return np.concatenate(plans), np.concatenate(edges)


def _positions(rows: NDArray[np.bool_]) -> Iterator[tuple[int, ...]]:
    """Yield the columns that are True, row by row."""
    columns = np.nonzero(rows)[1].tolist()
    ends = np.cumsum(rows.sum(axis=1)).tolist()
    return (tuple(columns[start:end]) for start, end in zip([0, *ends], ends, strict=False))
