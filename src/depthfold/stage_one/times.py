"""The times of segments with dropped layers, and the fastest segments between two positions."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict

from depthfold.core import LatencyTable, Position, Span
from depthfold.core.latency_table import picoseconds
from depthfold.stage_one.algorithms import NEVER
from depthfold.stage_one.shapes import Shapes

Pair = tuple[int, int]  # the times without and with an activation at the end
NO_TIME = (NEVER, NEVER)
WHOLE = -1  # in place of the number of a shape: the entry of a span from which nothing is dropped


class Times:
    """T[s, t, b] for every set of dropped layers, in whole picoseconds. NEVER if a segment is not possible.

    Drops are the bits of Shapes, those inside the span. Without `shapes`, nothing is dropped.
    """

    def __init__(self, latency: LatencyTable, shapes: Shapes | None) -> None:
        self.latency, self.shapes = latency, shapes
        self._ms: dict[tuple[Position, Position, int], tuple[float, float] | None] = {}  # the last one is the shape
        self.starts: dict[Position, list[Position]] = defaultdict(list)  # of the spans that end at a position
        self.ends: dict[Position, list[Position]] = defaultdict(list)
        for entry in latency.entries:
            i, j = entry.span.i, entry.span.j
            self._ms[i, j, WHOLE if shapes is None or entry.shape is None else shapes.number(entry.shape)] = entry.times
            if not self.ends[i] or self.ends[i][-1] != j:  # the entries are sorted by i and j
                self.ends[i].append(j)
                self.starts[j].append(i)
        self._segments: dict[tuple[Position, Position, int], Pair] = {}
        self._fastest: dict[tuple[Position, Position, int, int], Pair] = {}
        self._fewest: dict[tuple[Position, Position, int, int], Pair] = {}

    def within(self, s: Position, t: Position, mask: int) -> int:
        return self.shapes.within(s, t, mask) if mask and self.shapes else 0

    def representative(self, s: Position, m: Position, mask: int) -> int | None:
        return self.shapes.representative(s, m, mask) if mask and self.shapes else 0

    def no_cuts(self, mask: int) -> frozenset[Position]:
        return self.shapes.no_cuts(mask) if mask and self.shapes else frozenset()

    def ends_after(self, s: Position, m: Position) -> list[Position]:
        """Return the ends beyond m of the spans that start at s."""
        return self.ends[s][bisect_left(self.ends[s], m + 1) :]

    def segment(self, s: Position, t: Position, mask: int) -> Pair:
        """Return both times of (s, t] as one convolution."""
        key = (s, t, mask)
        found = self._segments.get(key)
        if found is None:
            ms = self.milliseconds(s, t, mask)
            found = self._segments[key] = (picoseconds(ms[0]), picoseconds(ms[1])) if ms else NO_TIME
        return found

    def milliseconds(self, s: Position, t: Position, mask: int) -> tuple[float, float] | None:
        """Return both times as they are in the table."""
        shapes = self.shapes
        if not mask or shapes is None:
            return self._ms.get((s, t, WHOLE))
        number = shapes.at(s, t, mask)
        if number is None:
            return None
        if not shapes.is_empty(s, t, mask):
            return self._ms.get((s, t, WHOLE if number == shapes.at(s, t, 0) else number))
        if shapes.leaves_alone(s, t, mask):
            return None
        if (s, t, number) in self._ms:
            return self._ms[s, t, number]
        return self.latency.empty_times(shapes.network, Span(s, t))

    def fastest(self, i: Position, j: Position, mask: int, b: int) -> Pair:
        """Return the least time of (i, j] without an activation inside, and the last cut of it; i if there is none."""
        key = (i, j, mask, b)
        if key in self._fastest:
            return self._fastest[key]
        best, cut, no_cuts = NEVER, -1, self.no_cuts(mask)
        for m in self.starts[j]:  # rising, so that of equal ones the smallest wins, as in Algorithm 1
            if m < i or m in no_cuts:
                continue
            time = self.segment(m, j, self.within(m, j, mask))[b]
            if time < best and m > i:
                time += self.fastest(i, m, self.within(i, m, mask), 0)[0]
            if time < best:
                best, cut = time, m
        self._fastest[key] = best, cut
        return best, cut

    def crossing(self, s: Position, m: Position, j: Position, mask: int, b: int) -> int:
        """Return the least time of (s, j] without a cut up to m."""
        best, no_cuts = NEVER, self.no_cuts(mask)
        for t in self.ends_after(s, m):
            if t > j:
                break
            if t in no_cuts:
                continue
            time = self.segment(s, t, self.within(s, t, mask))[b if t == j else 0]
            if time < best and t < j:
                time += self.fastest(t, j, self.within(t, j, mask), b)[0]
            best = min(best, time)
        return best

    def cuts(self, i: Position, j: Position, mask: int, b: int) -> list[Position]:
        """Return the cuts of the fastest segments between i and j, without i and j."""
        found = []
        while (cut := self.fastest(i, j, mask, b)[1]) > i:
            found.append(cut)
            j, mask, b = cut, self.within(i, cut, mask), 0
        return found[::-1]

    def along_activations(self, i: Position, j: Position, mask: int, b: int) -> int:
        """Return the time of (i, j] in as few segments as possible, the fastest of these (Section 5.3)."""
        return self._few(i, j, mask, b)[1]

    def _few(self, i: Position, j: Position, mask: int, b: int) -> Pair:
        """Return the least number of segments of (i, j], and their least time."""
        key = (i, j, mask, b)
        if i == j:
            return 0, 0
        if key not in self._fewest:
            best, no_cuts = (NEVER, NEVER), self.no_cuts(mask)
            for m in self.starts[j]:
                if m < i or m in no_cuts:
                    continue
                time = self.segment(m, j, self.within(m, j, mask))[b]
                count, before = self._few(i, m, self.within(i, m, mask), 0)
                if time < NEVER and before < NEVER:
                    best = min(best, (count + 1, before + time))
            self._fewest[key] = best
        return self._fewest[key]
