"""Reasons to doubt a latency table: it does not fit whole networks, or it was measured in two different hours."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

from depthfold.backends import Backend
from depthfold.core import Calibration
from depthfold.errors import BackendError
from depthfold.latency.blocks import BlockShape
from depthfold.latency.building import held
from depthfold.latency.candidates import build_block
from depthfold.latency.journal import LatencyJournal
from depthfold.latency.timer import Timer, Turns, milliseconds
from depthfold.tracing import TracedNetwork

# A calibration that is further off than this in the median was measured while something else ran, or on a runtime whose
# latencies are no sums. What we saw on machines that did nothing else: 0.2 to 4 %.
DOUBTFUL = 0.05
# A block that takes so much longer than before, or less long, was timed on what is no longer the same machine.
ANOTHER_HOUR = 0.15


class DoubtfulTable(UserWarning):
    """Sums over the table predict little: whole networks do not fit the times of their blocks, or some blocks were
    timed while the machine was slower or faster than for the others."""


def doubt_calibration(calibration: Calibration, journal: Path | None) -> None:
    """For measure_latency(), whose caller is warned."""
    if calibration.median_error > DOUBTFUL:
        kept = "" if journal is None else f" delete {_journal(journal)}, and"
        warnings.warn(
            f"The latency table is doubtful: it is {calibration}. If something else ran on this machine,{kept} measure "
            "again when it is quiet; otherwise trust what choose() times end to end, not sums over the table.",
            DoubtfulTable,
            stacklevel=3,
        )


def doubt_journal(
    network: TracedNetwork,
    backend: Backend,
    blocks: Mapping[str, BlockShape],
    journal: LatencyJournal,
    timer: Timer,
) -> None:
    """For measure_latency(), whose caller is warned: where others are to be added to what a journal holds, one block of
    it is timed once more. It is one in the middle: as long as most of them, and not the first, which was timed cold."""
    earlier = sorted((key for key in blocks if journal.timed(key)), key=journal.time)
    missing = any(key not in journal.reasons and not timer.enough(journal.turns[key]) for key in blocks)
    if not earlier or not missing:
        return
    key = earlier[len(earlier) // 2]
    turns: dict[str, Turns] = {}
    try:
        with held({key: build_block(network, backend, blocks[key])}) as again:
            timer.measure(again, turns)
    except BackendError:  # there is no room for it today, say: then the blocks to come will tell
        return
    change = milliseconds(turns[key]) / journal.time(key)
    if abs(change - 1) > ANOTHER_HOUR:
        warnings.warn(
            f"A block of {_journal(journal.path)} now takes {change:.2f} times as long as when it was measured, so new "
            "entries are not comparable. Delete it, and measure again when nothing else runs.",
            DoubtfulTable,
            stacklevel=3,
        )


def _journal(path: Path | None) -> str:
    return f"the journal {path} (and latency.json beside it)"
