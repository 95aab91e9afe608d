"""Blocks that no optimal plan needs, because merging them saves no time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from depthfold.core import FlaggedSpan, LatencyTable, Network, Position
from depthfold.stage_one.algorithms import NEVER, algorithm_1, algorithm_3, time_array
from depthfold.stage_one.checks import check_network

# The reason of blocks that are left out of an importance table.
SAVES_NO_TIME = "not measured: merging it saves no time on the target of the latency table"


def useless_blocks(network: Network, latency: LatencyTable, blocks: Iterable[FlaggedSpan]) -> frozenset[FlaggedSpan]:
    """Return the blocks whose merging saves no time, whatever the plan does with the layers around them.

    A block without an activation at an end lies in a longer stretch of layers without activations, and a segment may
    cross that end. So for every stretch (k, l] that can contain the block (i, j], the fastest segments with one of the
    network's own activations inside the block must be as fast as those without. Every plan that has the block then has
    an alternative that keeps one more activation and is not slower. If keeping an activation never lowers the
    importance, leaving these blocks out changes neither the latency nor the importance of any optimal plan.

    Raise TableError if the latency table is of another network.
    """
    check_network(network, latency)
    search = _BlockSearch(network, latency, tuple(blocks))
    return frozenset(block for block in search.blocks if search.is_useless(block))


class _BlockSearch:
    """T_opt of a latency table, and which stretches of layers the blocks can cover."""

    def __init__(self, network: Network, latency: LatencyTable, blocks: tuple[FlaggedSpan, ...]) -> None:
        self.blocks, self.L, self.activations = blocks, network.depth, network.activations
        self.T_opt, _ = algorithm_1(time_array(latency))
        exists = np.full((self.L + 1, self.L + 1, 2, 2), -np.inf)
        for block in blocks:
            exists[block.i, block.j, int(block.a), int(block.b)] = 0.0
        # possible[k, l, a, b]: blocks cover the layers k+1..l without an activation between them.
        self.possible = algorithm_3(exists)[0] > -np.inf

    def is_useless(self, block: FlaggedSpan) -> bool:
        a, b = int(block.a), int(block.b)
        kept = [
            m
            for m in range(block.i + 1, block.j)
            if m in self.activations and self.possible[block.i, m, a, 1] and self.possible[m, block.j, 1, b]
        ]
        stretches = [(k, l, at_l) for k, l, at_l in self._stretches(block) if self.T_opt[k, l, at_l] < NEVER]
        return bool(kept and stretches) and all(
            any(self.T_opt[k, m, 1] + self.T_opt[m, l, at_l] <= self.T_opt[k, l, at_l] for m in kept)
            for k, l, at_l in stretches
        )

    def _stretches(self, block: FlaggedSpan) -> Iterator[tuple[Position, Position, int]]:
        """Yield k, l and the flag at l of all layers k+1..l between two activations that can contain the block."""
        starts = [block.i] if block.a else [k for k in range(block.i) if self.possible[k, block.i, 1, 0]]
        ends = [(block.j, int(block.b))] if block.b or block.j == self.L else []
        if not block.b:
            later = ((l, at_l) for l in range(block.j + 1, self.L + 1) for at_l in (0, 1) if at_l or l == self.L)
            ends += [(l, at_l) for l, at_l in later if self.possible[block.j, l, 0, at_l]]
        return ((k, l, at_l) for k in starts for l, at_l in ends)
