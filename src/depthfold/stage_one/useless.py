"""Options of blocks that no optimal plan needs, because what they merge or drop saves no time."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from depthfold.core import BlockOption, FlaggedSpan, LatencyTable, Network, Position
from depthfold.stage_one.algorithms import NEVER
from depthfold.stage_one.checks import check_network
from depthfold.stage_one.shapes import Shapes
from depthfold.stage_one.times import Times

# The reasons of blocks and of options with drops that are left out of an importance table.
SAVES_NO_TIME = "not measured: merging it saves no time on the target of the latency table"
DROPS_SAVE_NO_TIME = (
    "not measured: dropping less or keeping an activation is as fast on the target of the latency table"
)
LEFT_OUT = frozenset({SAVES_NO_TIME, DROPS_SAVE_NO_TIME})
MANY = 512  # compare at most this many surroundings of a block; no block of MobileNetV2 has as many


def useless_options(
    network: Network, latency: LatencyTable, options: Iterable[BlockOption], *, splits: bool = True
) -> frozenset[BlockOption]:
    """Return the options of blocks that save no time, whatever the plan does with the layers around them.

    Every plan that has such an option has an alternative that is not slower: another option of the same block drops
    less (a subset), or blocks with one of the network's own activations between them cover the same layers and drop
    nothing else. A block without an activation at an end lies in a longer stretch of layers without activations, and a
    segment may cross that end. So the fastest segments of all stretches between two activations that can contain the
    block are compared, with everything that the blocks around it can drop. If dropping less, and keeping an activation,
    never lowers the importance, leaving these options out changes neither the latency nor the importance of any optimal
    plan of solve(). This does not hold for merge_along="B", where S is not free.

    Without `splits`, only blocks of several layers and only alternatives that drop less count. This is for importances
    in which a block of one layer costs something. An option with more than MANY surroundings is not returned.

    Raise TableError if the latency table is of another network.
    """
    search = _OptionSearch(network, latency, options, splits)
    return frozenset(option for option in search.options if search.is_useless(option))


class _Context(NamedTuple):
    """The layers k+1..l between two activations, the flag at l, and what the blocks on both sides drop, as bits."""

    k: Position
    l: Position
    at_l: int
    left: int
    right: int


class _OptionSearch:
    """The times of stretches of layers with drops, and what the blocks that cover them can drop."""

    def __init__(
        self, network: Network, latency: LatencyTable, options: Iterable[BlockOption], splits: bool = True
    ) -> None:
        check_network(network, latency)
        self.options, self.L, self.activations, self.splits = tuple(options), network.depth, network.activations, splits
        self.shapes = Shapes(network)
        self.times = Times(latency, self.shapes)
        self.masks: dict[FlaggedSpan, list[int]] = defaultdict(list)
        for block, dropped in self.options:
            self.masks[block].append(self.shapes.mask(dropped))
        self.open = sorted({block.i for block in self.masks if not block.a})  # where a block starts without activation
        self._unions: dict[FlaggedSpan, frozenset[int] | None] = {}
        self._contexts: dict[FlaggedSpan, list[_Context] | None] = {}

    def is_useless(self, option: BlockOption) -> bool:
        block, mask = option.block, self.shapes.mask(option.dropped)
        if not self.splits and len(block.span) == 1:
            return False
        less = [other for other in self.masks[block] if other != mask and other & ~mask == 0]
        parts: list[tuple[Position, int, int]] | None = None if self.splits else []
        found = False
        for context in self.contexts(block) or ():
            if (time := self._time(context, mask)) == NEVER:
                continue
            found = any(self._time(context, other) <= time for other in less)
            if not found:
                parts = [*self._parts(block, mask)] if parts is None else parts
                found = any(self._split_time(context, *part) <= time for part in parts)
            if not found:
                break
        return found

    def _parts(self, block: FlaggedSpan, mask: int) -> Iterator[tuple[Position, int, int]]:
        """Yield the activations inside a block that other blocks can keep, and the drops on both sides of each."""
        for m in (m for m in block.span.inner if m in self.activations):
            first = self._at_most(FlaggedSpan(block.i, m, block.a, True), mask)
            second = self._at_most(FlaggedSpan(m, block.j, True, block.b), mask)
            yield from ((m, one, two) for one, two in itertools.product(first, second))

    def _at_most(self, block: FlaggedSpan, mask: int) -> list[int]:
        """Return what the blocks that cover the same layers can drop, if it is a part of the mask."""
        unions = self.unions(block)
        return [union for union in (self.masks.get(block, []) if unions is None else unions) if union & ~mask == 0]

    def _time(self, context: _Context, mask: int) -> int:
        k, l, at_l, left, right = context
        return self.times.fastest(k, l, left | mask | right, at_l)[0]

    def _split_time(self, context: _Context, m: Position, one: int, two: int) -> int:
        k, l, at_l, left, right = context
        return self.times.fastest(k, m, left | one, 1)[0] + self.times.fastest(m, l, two | right, at_l)[0]

    def unions(self, block: FlaggedSpan) -> frozenset[int] | None:
        """Return what the blocks that cover the same layers can drop together, None if there are more than MANY.

        There is no activation between these blocks.
        """
        if block not in self._unions:
            found: set[int] | None = set(self.masks.get(block, ()))
            for m in (m for m in self.open if block.i < m < block.j):
                last = self.masks.get(FlaggedSpan(m, block.j, False, block.b), ())
                first = self.unions(FlaggedSpan(block.i, m, block.a, False)) if last else frozenset[int]()
                if found is None or first is None or len(first) * len(last) > MANY:
                    found = None
                    break
                found |= {one | two for one in first for two in last}
            self._unions[block] = None if found is None or len(found) > MANY else frozenset(found)
        return self._unions[block]

    def contexts(self, block: FlaggedSpan) -> list[_Context] | None:
        """Return all surroundings of a block, None if there are more than MANY."""
        if block not in self._contexts:
            self._contexts[block] = self._find_contexts(block)
        return self._contexts[block]

    def _find_contexts(self, block: FlaggedSpan) -> list[_Context] | None:
        lefts: list[tuple[Position, int]] = [(block.i, 0)] if block.a else []
        for k in range(0 if block.a else block.i):
            if (unions := self.unions(FlaggedSpan(k, block.i, True, False))) is None:
                return None
            lefts += [(k, union) for union in unions]
        rights: list[tuple[Position, int, int]] = []
        if block.b or block.j == self.L:
            rights.append((block.j, int(block.b), 0))
        for l, at_l in itertools.product(range(block.j + 1, self.L + 1) if not block.b else (), (0, 1)):
            if at_l or l == self.L:
                if (unions := self.unions(FlaggedSpan(block.j, l, False, bool(at_l)))) is None:
                    return None
                rights += [(l, at_l, union) for union in unions]
        if len(lefts) * len(rights) > MANY:
            return None
        return [_Context(k, l, at_l, one, two) for k, one in lefts for l, at_l, two in rights]
