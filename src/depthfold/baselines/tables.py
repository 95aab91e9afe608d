"""Baselines that solve() computes from other tables: LayerMerge's search, and the same importance for every block."""

from __future__ import annotations

import math
from dataclasses import replace

from depthfold.core import (
    Frontier,
    ImportanceTable,
    LatencyTable,
    Network,
    Score,
    Space,
    Surrogate,
    free_positions,
)
from depthfold.core.importance_table import ACCURACY
from depthfold.errors import InvalidValue
from depthfold.solver import solve


def layermerge_frontier(
    latency: LatencyTable,
    importance: ImportanceTable,
    network: Network,
    *,
    exponential: bool = True,
    surrogate: Surrogate | None = None,
) -> Frontier:
    """Return the plans of LayerMerge (ICML 2024) for tables that were measured with the move "drop-layers".

    Every block is merged into one convolution. Where the network has no activation, blocks of several layers end in
    one, and blocks of one layer do not. Branches are not dropped. With `exponential`, the value of a block is
    exp(I / 100), as published, where I is a change of the accuracy in per cent; this favours many short blocks.
    Otherwise it is I, as in the paper. A `surrogate` takes the place of both. Times are not rounded to 0.1 ms. Where
    the network has no activation after several layers in a row, only tables of the space "full" have all plans.
    """
    exponential = exponential and surrogate is None
    if exponential and importance.quantity not in ("", ACCURACY):
        raise InvalidValue(
            f"LayerMerge's exp(I / 100) is for {ACCURACY}, and this table has {importance.quantity}. Use "
            "exponential=False, or measure with another method."
        )
    free = free_positions(network)

    def ruled(entry: Score) -> Score:
        block = entry.span
        if entry.dropped.branches or (block.j in free and block.b != (len(block.span) > 1)):
            return replace(entry, samples=(), seeds=(), reason="against LayerMerge's rule")
        if exponential and entry.samples:
            return replace(entry, samples=(math.exp((entry.mean - importance.base) / 100),), seeds=())
        return entry

    base = 0.0 if exponential else importance.base
    table = replace(importance, base=base, entries=tuple(map(ruled, importance.entries)))
    frontier = solve(latency, table, network=network, surrogate=surrogate, merge_along="B")
    return replace(frontier, quantity="the sum of exp(I / 100)") if exponential else frontier


def constant_importance(network: Network, space: Space = "paper") -> ImportanceTable:
    """Return a table that says nothing about the network: -1 for every block of several layers, 0 for single layers.

    A method that measures importances must find better plans than solve() does with this table.
    """
    blocks = network.flagged_spans(space)
    entries = tuple(Score(span=block, samples=(-1.0 if len(block.span) > 1 else 0.0,)) for block in blocks)
    return ImportanceTable(network=network.name, fingerprint=network.fingerprint, entries=entries)
