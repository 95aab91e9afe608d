"""All moves: the Pareto-optimal chains of blocks between two activations, if layers can be dropped.

T_opt and I_opt of the paper are independent, because neither depends on the choices of the other. With dropped layers
they are not: what a block drops decides its importance and the shape of every segment that contains a part of it, and a
segment may contain parts of several blocks. So from each activation i, blocks are added one after another. After the
blocks up to m, only this matters for the rest: where the open segment starts (s), and which shape it has so far. For
each such state the Pareto-optimal labels (time of the closed segments, importance) are kept.
"""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from depthfold.core import Drops, FlaggedSpan, Position
from depthfold.solver.edges import EdgePlans, Edges, Items, UsedSegment
from depthfold.stage_one import NEVER, Ints, Times


class Block(NamedTuple):
    """One entry of the importance table, with its drops as bits. `n` is its number."""

    n: int
    i: Position
    j: Position
    b: int
    mask: int
    importance: float


class Label(NamedTuple):
    """A chain of blocks: its last block and the label of those before it. `t` is the time of the closed segments."""

    t: int
    I: float
    before: Label | None
    block: Block | None


State = tuple[Position, int]  # the start of the open segment, and drops in it that give its shape
Extensions = list[tuple[State, int]]
START = Label(0, 0.0, None, None)


class Joint:
    """Stage one for segments and blocks together: the chains of blocks between each two activations.

    With `whole_blocks`, every block is one segment.
    """

    def __init__(
        self, times: Times, L: Position, options: Mapping[tuple[FlaggedSpan, Drops], float], whole_blocks: bool = False
    ) -> None:
        self.times, self.L, self.whole_blocks = times, L, whole_blocks
        self.blocks: dict[tuple[Position, bool], list[Block]] = defaultdict(list)  # by their start and the flag there
        self._after: dict[tuple[State, int], Extensions] = {}
        for n, ((block, dropped), importance) in enumerate(options.items()):
            mask = times.shapes.mask(dropped) if times.shapes else 0
            self.blocks[block.i, block.a].append(Block(n, block.i, block.j, int(block.b), mask, importance))
        found = [
            (j, b, i, label)
            for i in range(L)
            for (j, b), labels in self._from(i).items()
            for label in undominated(labels)
        ]
        found.sort(key=lambda edge: edge[:3])
        self.labels = [label for *_, label in found]
        l, b, k = (np.array([edge[n] for edge in found], dtype=np.int64) for n in range(3))
        t = np.array([label.t for label in self.labels], dtype=np.int64)
        self.edges = Edges(k, l, b, t, np.array([label.I for label in self.labels], dtype=np.float64))

    def plans(self, used: Ints) -> EdgePlans:
        masks: list[int] = []
        along_A: list[int] = []
        cuts: list[tuple[int, Position]] = []
        blocks: list[tuple[int, Block]] = []
        segments: set[UsedSegment] = set()
        for n, e in enumerate(used.tolist()):
            chain = self._chain(self.labels[e])
            i, j, b = chain[0].i, chain[-1].j, chain[-1].b
            mask = functools.reduce(operator.or_, (block.mask for block in chain))
            between = [block.i for block in chain[1:]] if self.whole_blocks else self.times.cuts(i, j, mask, b)
            cuts += [(n, p) for p in (i, *between)]
            blocks += [(n, block) for block in chain]
            along_A.append(self.times.along_activations(i, j, mask, b))
            segments.update((s, t, self.times.within(s, t, mask)) for s, t in pairwise((i, *between, j)))
            masks.append(mask)
        edge, at = _columns(cuts)
        owner, start = _columns((n, block.i) for n, block in blocks)
        return EdgePlans(
            cuts=Items.of(edge, at, len(used)),
            boundaries=Items.of(owner, start, len(used)),
            ends=np.array([block.j for _, block in blocks]),
            importances=np.array([block.importance for _, block in blocks]),
            along_A=np.array(along_A),
            dropped=masks,
            segments=frozenset(segments),
        )

    def _chain(self, label: Label) -> list[Block]:
        chain: list[Block] = []
        at: Label | None = label
        while at is not None and at.block is not None:
            chain.append(at.block)
            at = at.before
        return chain[::-1]

    def _from(self, i: Position) -> dict[tuple[Position, int], list[Label]]:
        """Return the labels of all chains that start with the activation at i and end with one, or at L."""
        found: dict[tuple[Position, int], list[Label]] = defaultdict(list)
        states: dict[Position, dict[State, list[Label]]] = {i: {(i, 0): [START]}}
        for m in range(i, self.L):
            blocks = self.blocks.get((m, m == i))
            if m not in states or not blocks:
                continue
            for state, labels in states.pop(m).items():
                kept = undominated(labels)
                for block in blocks:
                    ends = block.b or block.j == self.L
                    for new, extra in self._extensions(state, block):
                        after = found[block.j, block.b] if ends else states.setdefault(block.j, {}).setdefault(new, [])
                        value = block.importance
                        after += [Label(label[0] + extra, label[1] + value, label, block) for label in kept]
        return found

    def _extensions(self, state: State, block: Block) -> Extensions:
        """Return the states after a block, each with the time that is added. They do not depend on the first block."""
        key = (state, block.n)
        if key not in self._after:
            if block.b or block.j == self.L:
                extra = self._closed(state, block)
                self._after[key] = [((block.j, 0), extra)] if extra < NEVER else []
            else:
                more = (block.j, False) in self.blocks
                self._after[key] = list(self._open(state, block)) if more else []
        return self._after[key]

    def _closed(self, state: State, block: Block, end: Position = 0) -> int:
        """Return the time from the start of the open segment to a cut at `end` inside the block, by default its end."""
        (s, mask), times, m = state, self.times, block.i
        b = block.b if not end else 0
        end = end or block.j
        if self.whole_blocks:
            return times.segment(m, block.j, block.mask)[b]
        own = times.within(m, end, block.mask)
        if s == m:
            return times.fastest(m, end, own, b)[0]
        return times.crossing(s, m, end, mask | own, b)

    def _open(self, state: State, block: Block) -> Iterable[tuple[State, int]]:
        """Yield the states after a block without an activation at its end, each with the time until its last cut."""
        (s, mask), times, m, j = state, self.times, block.i, block.j
        ends = [j] if self.whole_blocks else [p for p in range(m + 1, j + 1) if p == j or times.ends_after(p, j)]
        no_cuts = times.no_cuts(block.mask)
        for p in ends:
            extra = NEVER if p in no_cuts else self._closed(state, block, p)
            own = times.representative(p, j, times.within(p, j, block.mask)) if p < j else 0
            if extra < NEVER and own is not None:
                yield (p, own), extra
        if not self.whole_blocks and times.ends_after(s, j):
            union = times.representative(s, j, mask | block.mask)
            if union is not None:
                yield (s, union), 0


def undominated(labels: list[Label]) -> list[Label]:
    """Return the labels that no other one beats in time and importance, by rising time; of equal ones the first."""
    if len(labels) == 1:
        return labels
    kept: list[Label] = []
    for label in sorted(labels, key=lambda label: (label[0], -label[1])):
        if not kept or label[1] > kept[-1][1]:
            kept.append(label)
    return kept


def _columns(pairs: Iterable[tuple[int, int]]) -> tuple[Ints, Ints]:
    one, two = zip(*pairs, strict=True)
    return np.array(one), np.array(two)
