"""Edges of stage two: from one activation to the next, with the blocks and segments that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np

from depthfold.core import Position
from depthfold.stage_one import NEVER, Floats, Ints, algorithm_1, algorithm_3, time_along_activations

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
class Items:
    """Positions of edges, sorted by edge: those of edge n are at[first[n]:first[n + 1]]."""

    first: Ints
    at: Ints

    @classmethod
    def of(cls, edge: Ints, at: Ints, number: int) -> Self:
        """Return the items at the positions `at` of the edges `edge`, which are numbered below `number`."""
        first = np.append(0, np.cumsum(np.bincount(edge, minlength=number)))
        return cls(first, at[np.argsort(edge, kind="stable")])

    def of_each(self, edge: Ints) -> tuple[Ints, Ints]:
        """Return all items of all given edges: the index of each in `edge`, and in `at`."""
        start, count = self.first[edge], self.first[edge + 1] - self.first[edge]
        owner = np.repeat(np.arange(len(edge)), count)
        return owner, np.arange(len(owner)) + np.repeat(start - np.cumsum(count) + count, count)


@dataclass(frozen=True, slots=True)
class EdgePlans:
    """What the edges that plans use stand for: the segments and the blocks of each, and what they drop."""

    cuts: Items  # S, with the start of the edge
    boundaries: Items  # B, with the start of the edge
    ends: Ints  # of the block after each boundary
    importances: Floats  # of the same blocks
    along_A: Ints  # the time of each edge if merging followed A
    dropped: Sequence[int]  # by each edge, as bits; empty if no edge drops anything
    segments: frozenset[UsedSegment]  # of all edges


class StageOne(Protocol):
    """A solved stage one: the edges, and what those that are used stand for."""

    edges: Edges

    def plans(self, used: Ints) -> EdgePlans: ...


class Separate:
    """Stage one of the paper: nothing is dropped, so that the fastest segments and the best blocks are independent."""

    def __init__(self, T: Ints, I: Floats) -> None:
        self.T, self.I, self.L = T, I, len(T) - 1
        T_opt, self.S_opt = algorithm_1(T)
        I_opt, self.B_opt = algorithm_3(I)
        possible = (T_opt < NEVER) & (I_opt[:, :, 1] > -np.inf)  # indices: k, l, b
        # Difference: Algorithm 4 also has states with a = 0 before L. They are not needed, because T_opt and I_opt pass
        # positions without an activation.
        possible[:, : self.L, 0] = False
        l, b, k = np.nonzero(possible.transpose(1, 2, 0))
        self.edges = Edges(k, l, b, T_opt[k, l, b], I_opt[k, l, 1, b])

    def plans(self, used: Ints) -> EdgePlans:
        k, l, b = self.edges.k[used], self.edges.l[used], self.edges.b[used]
        cuts, segments = self._follow_S(k, l, b)
        along_A = time_along_activations(self.T)[k, l, b]
        return EdgePlans(cuts, *self._follow_B(k, l, b), along_A, (), segments)

    def _follow_S(self, k: Ints, l: Ints, b: Ints) -> tuple[Items, frozenset[UsedSegment]]:
        """Return the cuts, and all segments."""
        used = np.zeros((self.L + 1, self.L + 1), dtype=bool)
        row, number, steps = np.arange(len(k)), len(k), []
        while row.size:
            m = self.S_opt[k, l, b]
            used[m, l] = True
            steps.append((row, m))
            on = m > k
            row, k, l = row[on], k[on], m[on]
            b = np.zeros_like(l)  # there is no activation between k and l
        edge, at = map(np.concatenate, zip(*steps, strict=True))
        return Items.of(edge, at, number), frozenset((i, j, 0) for i, j in np.argwhere(used).tolist())

    def _follow_B(self, k: Ints, l: Ints, b: Ints) -> tuple[Items, Ints, Floats]:
        """Return the boundaries, and the ends and importances of the blocks after them."""
        row, number, steps = np.arange(len(k)), len(k), []
        while row.size:
            m = self.B_opt[k, l, 1, b]
            on = m > k
            steps.append((row, m, l, self.I[m, l, np.where(on, 0, 1), b]))
            row, k, l = row[on], k[on], m[on]
            b = np.zeros_like(l)
        edge, at, ends, importances = map(np.concatenate, zip(*steps, strict=True))
        order = np.argsort(edge, kind="stable")  # that of Items
        return Items.of(edge, at, number), ends[order], importances[order]
