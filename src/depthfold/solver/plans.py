"""From labels back to plans: A, S and B of every label at L, all of them at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from depthfold.core import Point, Position
from depthfold.solver.arrays import Bools, Floats, Ints
from depthfold.solver.stage_two import Labels
from depthfold.solver.sums import rounded_to_nearest, rounded_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """What the plans are read from: the tables themselves, and the choices of stage one. All of them by the flags at
    the ends, too: T[b, i, j], I[a, b, i, j]."""

    T: Floats
    I: Floats
    S_opt: Ints
    M_opt: Ints
    B_opt: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """One row for each plan, one column for each position. A summand stands in the column where its span ends.

    `used` has a row for each position instead: the spans that are a segment of some plan.
    """

    activations: Bools
    cuts: Bools
    boundaries: Bools
    times: Floats
    importances: Floats
    times_by_activations: Floats
    used: Bools


def points(labels: Labels, tables: Tables) -> tuple[tuple[Point, ...], list[tuple[Position, Position]]]:
    """The frontier's plans by rising latency, and the ends of all the segments that they merge.

    Importances were compared on the lattice, where a sum may be off by L/2 units. Here every sum is taken again from
    the entries themselves, and a plan that turns out to be beaten in the last digits is left out.
    """
    rows = _trace_back(labels, tables)
    found = zip(
        rounded_up(rows.times),
        rounded_to_nearest(rows.importances),
        rounded_up(rows.times_by_activations),
        _positions(rows.activations),
        _positions(rows.cuts),
        _positions(rows.boundaries),
        strict=True,
    )
    front: list[Point] = []
    for latency, importance, by_activations, A, S, B in sorted(found, key=lambda plan: (plan[0], -plan[1])):
        if not front or importance > front[-1].importance:
            front.append(
                Point(
                    latency=latency,
                    importance=importance,
                    latency_by_activations=by_activations,
                    activations=A,
                    cuts=S,
                    boundaries=B,
                )
            )
    return tuple(front), [(i, j) for i, j in np.argwhere(rows.used).tolist()]


def _trace_back(labels: Labels, tables: Tables) -> _Rows:
    label = np.arange(labels.final.start, labels.final.stop)
    shape = len(label), tables.T.shape[-1]
    rows = _Rows(
        activations=np.zeros(shape, dtype=bool),
        cuts=np.zeros(shape, dtype=bool),
        boundaries=np.zeros(shape, dtype=bool),
        times=np.zeros(shape),
        importances=np.zeros(shape),
        times_by_activations=np.zeros(shape),
        used=np.zeros(tables.T.shape[1:], dtype=bool),
    )
    row, k, l, b = _steps(labels, label)
    rows.activations[row, l] = b == 1
    rows.cuts[row, k] = rows.boundaries[row, k] = True
    _follow_S(rows, tables, row, k, l, b)
    _follow_A(rows, tables, row, k, l, b)
    _follow_B(rows, tables, row, k, l, b)
    rows.cuts[:, 0] = rows.boundaries[:, 0] = False
    return rows


def _steps(labels: Labels, label: Ints) -> tuple[Ints, ...]:
    """Every step of every plan from one activation to the next: its row, k, l and the flag at l."""
    row = np.arange(len(label))
    steps = []
    while row.size:
        before = labels.parent[label]
        k = labels.position[before]
        steps.append((row, k, labels.position[label], labels.flag[label]))
        row, label = row[k > 0], before[k > 0]
    return tuple(np.concatenate(column) for column in zip(*steps, strict=True))


def _follow_S(rows: _Rows, tables: Tables, row: Ints, k: Ints, l: Ints, b: Ints) -> None:
    while row.size:
        m = tables.S_opt[b, k, l]
        rows.times[row, l] = tables.T[b, m, l]
        rows.used[m, l] = True
        on = m > k
        row, k, l = row[on], k[on], m[on]
        b = np.zeros_like(l)  # between two activations none stands
        rows.cuts[row, l] = True


def _follow_A(rows: _Rows, tables: Tables, row: Ints, k: Ints, l: Ints, b: Ints) -> None:
    while row.size:
        m = tables.M_opt[b, k, l]
        rows.times_by_activations[row, l] = tables.T[b, m, l]
        on = m > k
        row, k, l = row[on], k[on], m[on]
        b = np.zeros_like(l)


def _follow_B(rows: _Rows, tables: Tables, row: Ints, k: Ints, l: Ints, b: Ints) -> None:
    while row.size:
        m = tables.B_opt[1, b, k, l]
        on = m > k
        rows.importances[row, l] = tables.I[np.where(on, 0, 1), b, m, l]
        row, k, l = row[on], k[on], m[on]
        b = np.zeros_like(l)
        rows.boundaries[row, l] = True


def _positions(rows: Bools) -> Iterator[tuple[int, ...]]:
    columns = np.nonzero(rows)[1].tolist()
    ends = np.cumsum(rows.sum(axis=1)).tolist()
    return (tuple(columns[start:end]) for start, end in zip([0, *ends], ends, strict=False))
