"""An independent reference for the solver with dropped layers: every plan of a small network."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations, pairwise
from typing import NamedTuple

from depthfold.core import NOTHING, ConvShape, Drops, FlaggedSpan, ImportanceTable, LatencyTable, Network, Span
from depthfold.errors import PlanError
from oracle import Plan, rounded_up


class Blocks(NamedTuple):
    """A chain of blocks from 0 to L: the activations (L included), the boundaries, the drops and the exact sum."""

    activations: frozenset[int]
    boundaries: tuple[int, ...]
    dropped: Drops
    importance: Fraction


def every_chain(importance: ImportanceTable) -> Iterator[Blocks]:
    """Every chain of entries in which the flags of neighbours agree."""
    entries: dict[tuple[int, bool], list[tuple[FlaggedSpan, Drops, Fraction]]] = {}
    L = importance.depth
    for entry in importance.entries:
        if entry.samples:
            value = Fraction(entry.samples[0])
            entries.setdefault((entry.span.i, entry.span.a), []).append((entry.span, entry.dropped, value))

    def walk(position: int, flag: bool, so_far: Blocks) -> Iterator[Blocks]:
        for block, dropped, value in entries.get((position, flag), ()):
            active = so_far.activations | ({block.j} if block.b else set())
            union = Drops(so_far.dropped.layers + dropped.layers, so_far.dropped.branches + dropped.branches)
            total = so_far.importance + value
            if block.j == L:
                yield Blocks(active, so_far.boundaries, union, total)
            else:
                yield from walk(block.j, block.b, Blocks(active, (*so_far.boundaries, block.j), union, total))

    yield from walk(0, True, Blocks(frozenset(), (), NOTHING, Fraction(0)))


class Segments:
    """The time of one segment, from the definition: compose what is left, and look its shape up in the table."""

    def __init__(self, latency: LatencyTable, network: Network) -> None:
        self.network = network
        self.entries = {(entry.span, entry.shape): entry.times for entry in latency.entries}
        self.outside = latency.calibration.outside if latency.calibration else None
        self.spans = {entry.span for entry in latency.entries}
        self.seen: dict[tuple[object, ...], tuple[int, int] | None] = {}

    def times(self, s: int, t: int, dropped: Drops) -> tuple[int, int] | None:
        layers = tuple(l for l in dropped.layers if s < l <= t)
        branches = tuple(branch for branch in dropped.branches if s <= branch.i and branch.j <= t)
        key = (s, t, layers, branches)
        if key not in self.seen:
            found = self._times(Span(s, t), Drops(layers, branches))
            self.seen[key] = None if found is None else (rounded_up(found[0]), rounded_up(found[1]))
        return self.seen[key]

    def _times(self, span: Span, dropped: Drops) -> tuple[float, float] | None:
        if span not in self.spans:
            return None
        if not dropped:
            return self.entries.get((span, None))
        gone = set(dropped.layers) | {l for branch in dropped.branches for l in range(branch.i + 1, branch.j + 1)}
        alive = [
            skip
            for skip in self.network.skips
            if span.i <= skip.source
            and skip.target <= span.j
            and not any(branch.i <= skip.source and skip.target <= branch.j for branch in dropped.branches)
        ]
        nothing_left = gone >= set(range(span.i + 1, span.j + 1))
        if nothing_left and alive:
            return None  # it would compute 2x
        try:
            shape: ConvShape = self.network.merged_shape(span, dropped)
        except PlanError:  # a skip does not fit into the kernel
            return None
        if not nothing_left:
            return self.entries.get((span, None if shape == self.network.merged_shape(span) else shape))
        if (span, shape) in self.entries:
            return self.entries[span, shape]
        if any(skip.target == span.j and skip.source < span.i for skip in self.network.skips):
            return None  # nothing says how long the addition takes
        start = self.outside if span.i == 0 else 0.0
        if start is None:
            return None  # nor, for the first segment, everything outside
        last = self.entries.get((Span(span.j - 1, span.j), None))
        return last and (start, start + max(last[1] - last[0], 0.0))


def fastest(segments: Segments, cuts: Iterator[tuple[int, ...]], chain: Blocks, L: int) -> int | None:
    """The least time over some sets of cuts, None if none of them is possible."""
    best: int | None = None
    known: dict[tuple[int, int], int | None] = {}
    for chosen in cuts:
        total = 0
        for ends in pairwise((0, *chosen, L)):
            if ends not in known:
                both = segments.times(*ends, chain.dropped)
                known[ends] = both and both[ends[1] in chain.activations]
            if (own := known[ends]) is None:
                break
            total += own
        else:
            best = total if best is None else min(best, total)
    return best


def every_cuts(chain: Blocks, L: int) -> Iterator[tuple[int, ...]]:
    """Every set of cuts that has the activations and no position strictly inside a dropped branch."""
    forced = chain.activations - {L}
    dead = {p for branch in chain.dropped.branches for p in range(branch.i + 1, branch.j)}
    assert not forced & dead
    free = [p for p in range(1, L) if p not in forced and p not in dead]
    for n in range(len(free) + 1):
        for more in combinations(free, n):
            yield tuple(sorted(forced.union(more)))


def every_plan(
    latency: LatencyTable, importance: ImportanceTable, network: Network, whole_blocks: bool = False
) -> Iterator[Plan]:
    """The fastest plan of every chain of blocks. With `whole_blocks`, the cuts are the boundaries."""
    segments, L = Segments(latency, network), importance.depth
    known: dict[tuple[object, ...], int | None] = {}
    for chain in every_chain(importance):
        key = (chain.activations, chain.dropped, chain.boundaries if whole_blocks else ())
        if key not in known:
            cuts = iter([chain.boundaries]) if whole_blocks else every_cuts(chain, L)
            known[key] = fastest(segments, cuts, chain, L)
        if (time := known[key]) is not None:
            yield time, chain.importance


def frontier_with_moves(
    latency: LatencyTable, importance: ImportanceTable, network: Network, whole_blocks: bool = False
) -> list[Plan]:
    front: list[Plan] = []
    for time, value in sorted(set(every_plan(latency, importance, network, whole_blocks)), key=lambda p: (p[0], -p[1])):
        if not front or value > front[-1][1]:
            front.append((time, value))
    return front
