"""Edges of stage two: the ways from one activation to the next, and the blocks and segments that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from depthfold.core import Position
from depthfold.solver.checks import check_covered
from depthfold.stage_one import NEVER, Floats, Ints, algorithm_1, algorithm_3, time_along_activations

Bools = NDArray[np.bool_]
UsedSegment = tuple[Position, Position, int]  # its ends, and its drops as bits


@dataclass(frozen=True, slots=True)
class Edges:
    """Layers k+1..l without an activation between them: the flag b at l, the time t and the importance I.

    They are sorted by l, b and k. Two positions may have several edges, of which none beats another.
    """

    k: Ints
    l: Ints
    b: Ints
    t: Ints
    I: Floats


@dataclass(frozen=True, slots=True)
class Ways:
    """The plans of some edges, one row for each: its cuts and boundaries, both with k, the importance of each block in
    the column where the block ends, the time if merging followed A, and the drops as bits."""

    cuts: Bools
    boundaries: Bools
    importances: Floats
    along_A: Ints
    dropped: Sequence[int]
    segments: frozenset[UsedSegment]

    @classmethod
    def empty(cls, edges: int, L: Position, dropped: Sequence[int] = (), segments: Sequence[UsedSegment] = ()) -> Self:
        shape = (edges, L + 1)
        rows = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool), np.zeros(shape)
        return cls(*rows, np.zeros(edges, dtype=np.int64), dropped, frozenset(segments))


class StageOne(Protocol):
    """A solved stage one: the edges, and the plans of those that are used."""

    edges: Edges

    def ways(self, used: Ints) -> Ways: ...


class Separate:
    """Stage one of the paper: nothing is dropped, so that the fastest segments and the best blocks are independent."""

    def __init__(self, T: Ints, I: Floats) -> None:
        self.T, self.I, self.L = T, I, len(T) - 1
        T_opt, self.S_opt = algorithm_1(T)
        I_opt, self.B_opt = algorithm_3(I)
        check_covered(T_opt, I_opt)
        possible = (T_opt < NEVER) & (I_opt[:, :, 1] > -np.inf)  # indices: k, l, b
        # Difference: Algorithm 4 also has states with a = 0 before L. They are not needed, because T_opt and I_opt pass
        # positions without an activation.
        possible[:, : self.L, 0] = False
        l, b, k = np.nonzero(possible.transpose(1, 2, 0))
        self.edges = Edges(k, l, b, T_opt[k, l, b], I_opt[k, l, 1, b])

    def ways(self, used: Ints) -> Ways:
        k, l, b = self.edges.k[used], self.edges.l[used], self.edges.b[used]
        ways = Ways.empty(len(used), self.L)
        self._follow_B(k, l, b, ways)
        segments = self._follow_S(k, l, b, ways)
        ways.along_A[:] = time_along_activations(self.T)[k, l, b]
        return Ways(ways.cuts, ways.boundaries, ways.importances, ways.along_A, (), segments)

    def _follow_S(self, k: Ints, l: Ints, b: Ints, ways: Ways) -> frozenset[UsedSegment]:
        """Enter the cuts, and return all segments."""
        used = np.zeros((self.L + 1, self.L + 1), dtype=bool)
        row = np.arange(len(k))
        while row.size:
            m = self.S_opt[k, l, b]
            used[m, l] = True
            ways.cuts[row, m] = True
            on = m > k
            row, k, l = row[on], k[on], m[on]
            b = np.zeros_like(l)  # there is no activation between k and l
        return frozenset((i, j, 0) for i, j in np.argwhere(used).tolist())

    def _follow_B(self, k: Ints, l: Ints, b: Ints, ways: Ways) -> None:
        """Enter the boundaries and the importances."""
        row = np.arange(len(k))
        while row.size:
            m = self.B_opt[k, l, 1, b]
            on = m > k
            ways.importances[row, l] = self.I[m, l, np.where(on, 0, 1), b]
            ways.boundaries[row, m] = True
            row, k, l = row[on], k[on], m[on]
            b = np.zeros_like(l)
