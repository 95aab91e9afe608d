"""A warning about importances by which a much faster network would be better than the unchanged one."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from statistics import median

from depthfold.core import FlaggedSpan, ImportanceTable, LatencyTable, Point, Position

SHARE = 2 / 3  # of the latency of the unchanged network: if the best plan takes more, most budgets still have a use
NOISE = 0.05  # of the score of the original


class ImplausibleImportances(UserWarning):
    """By its importances, the unchanged network loses more than one at a fraction of its latency."""


def warn_if_implausible(latency: LatencyTable, importance: ImportanceTable, best: Point) -> None:
    """Give an ImplausibleImportances warning if the best plan is far faster than the unchanged network, which loses.

    The unchanged network is the original, so its importances should sum to about 0. They do not if a layer that is left
    as it is has not recovered in its training. The sum may be below 0 by the noise of the scores, or by what removing a
    typical block costs; the paper's own trainings reach that, and alpha corrects for it.
    """
    original, unchanged = latency.original, _unchanged(latency, importance)
    if not original or unchanged is None or best.latency > SHARE * original:
        return
    typical = median(abs(value) for value in importance.importances.values())
    if -unchanged <= max(typical, NOISE * abs(importance.base)):
        return
    warnings.warn(
        f"By these importances, a network at {best.latency / original:.0%} of the latency is better than the unchanged "
        f"one, whose importances sum to {unchanged:.4g}: each block probably lost something in its training. Measure "
        'again with method="brief" (--method brief) or longer trainings, or correct for the loss with alpha (--alpha) '
        "or a surrogate (--surrogate).",
        ImplausibleImportances,
        stacklevel=3,
    )


def _unchanged(latency: LatencyTable, importance: ImportanceTable) -> float | None:
    """Return the sum of the importances of the blocks that change nothing; the highest, if there are several chains.

    Return None if the table has no such chain.
    """
    depth, own = importance.depth, _activations(latency, importance)
    sums: dict[Position, float] = {0: 0.0}
    for block, value in sorted(importance.importances.items()):  # by i, and blocks that end at i start before it
        if block.i in sums and _changes_nothing(block, own):
            there = sums[block.i] + value
            sums[block.j] = max(sums.get(block.j, there), there)
    return sums.get(depth)


def _changes_nothing(block: FlaggedSpan, own: Collection[Position]) -> bool:
    inside = range(block.i + 1, block.j)
    return (block.a, block.b) == (block.i in own, block.j in own) and not any(position in own for position in inside)


def _activations(latency: LatencyTable, importance: ImportanceTable) -> Collection[Position]:
    """Return the positions with an activation, and 0. A block has the flag 0 only where the network has none."""
    if latency.activations is not None:
        return {0, *latency.activations}
    spans = [entry.span for entry in importance.entries]
    bare = {span.i for span in spans if not span.a} | {span.j for span in spans if not span.b}
    return {*range(importance.depth + 1)} - bare
