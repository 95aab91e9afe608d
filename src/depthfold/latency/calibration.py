"""From blocks timed alone to blocks in context: a fit over whole networks.

Timed alone, a block pays its own launch and often the conversion of its input and output to the layout that the
runtime likes; inside a network it does not. And it has an activation where a plan may have none, or none where a plan
inserts one. How much that is depends on the runtime, so it is measured: some plans are built as whole networks and
timed, and what the times of their blocks do not explain is fitted.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from depthfold.backends import Backend
from depthfold.core import Calibration, Position, Span
from depthfold.core.latency_table import COSTS, NEVER_NEGATIVE
from depthfold.errors import BackendError
from depthfold.latency.blocks import BlockShape
from depthfold.latency.candidates import build_block, held
from depthfold.latency.journal import LatencyJournal
from depthfold.latency.timer import Timer, Turns, milliseconds
from depthfold.tracing import TracedNetwork

Floats = NDArray[np.float64]

# How much the fit trusts that times alone are right: the weight of "slope 1 and nothing else" against the networks.
TRUST = 1e-4
# What activations cost is looked for if so many networks have them otherwise than their blocks. Two were seen to
# mistake noise for it.
ENOUGH = 3


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole network that was timed: its segments, its latency in milliseconds, and the positions of its activations.

    If `activations` is None, every segment ends as its block was timed.
    """

    segments: tuple[Span, ...]
    latency: float
    activations: frozenset[Position] | None = None


def fit(wholes: Sequence[Whole], blocks: Mapping[Span, BlockShape], times: Mapping[Span, float]) -> Calibration:
    """The calibration that explains the whole networks best, in relative error.

    What activations cost is a part of it if that predicts networks better that the fit has not seen; otherwise it
    would fit the noise of a runtime on which they cost nothing.
    """
    every = tuple(range(len(COSTS)))
    without, off = _fit(wholes, blocks, times, every[:-1])
    differing = (any(_activated(span, whole, blocks) for span in whole.segments) for whole in wholes)
    if sum(differing) < ENOUGH:
        return replace(without, per_activation=None)
    found, less_off = _fit(wholes, blocks, times, every)
    return found if less_off < off else without


def _fit(
    wholes: Sequence[Whole], blocks: Mapping[Span, BlockShape], times: Mapping[Span, float], used: tuple[int, ...]
) -> tuple[Calibration, float]:
    """The best calibration with these costs, and how far it is off: the sum of the squares of its errors, each network
    predicted from all the others."""
    rows = np.array([_features(whole, blocks, times) for whole in wholes])
    latencies = np.array([whole.latency for whole in wholes])
    errors = []
    for n, whole in enumerate(wholes):
        others = np.arange(len(wholes)) != n
        guess = _calibration(_solve_within(rows[others], latencies[others], used), [0.0] * len(wholes))
        errors.append(abs(_predicted(guess, whole, blocks, times) / whole.latency - 1.0))
    return _calibration(_solve_within(rows, latencies, used), errors), float(np.square(errors).sum())


def _calibration(theta: Floats, errors: Sequence[float]) -> Calibration:
    costs = dict(zip(COSTS, theta.tolist(), strict=True))
    return Calibration(**costs, networks=len(errors), median_error=median(errors), worst_error=max(errors))


def _predicted(
    calibration: Calibration, whole: Whole, blocks: Mapping[Span, BlockShape], times: Mapping[Span, float]
) -> float:
    """As the table has it, not as the fit has it: there, no block costs less than a share of its time alone."""
    inside = (
        calibration.in_context(times[span], *blocks[span].elements, _activated(span, whole, blocks))
        for span in whole.segments
    )
    return calibration.outside + sum(inside)


def _activated(span: Span, whole: Whole, blocks: Mapping[Span, BlockShape]) -> int:
    return 0 if whole.activations is None else blocks[span].activated(span.j in whole.activations)


def _features(whole: Whole, blocks: Mapping[Span, BlockShape], times: Mapping[Span, float]) -> list[float]:
    """What each of the COSTS is for, in their order."""
    elements = [blocks[span].elements for span in whole.segments]
    return [
        sum(times[span] for span in whole.segments),
        float(len(whole.segments)),
        sum(read for read, _ in elements) / 1e6,
        sum(written for _, written in elements) / 1e6,
        1.0,
        sum(_activated(span, whole, blocks) for span in whole.segments) / 1e6,
    ]


def _solve_within(rows: Floats, latencies: Floats, used: tuple[int, ...]) -> Floats:
    """The best fit with these costs in which none is less than nothing that must not be: the table could not hold it.

    Where a limit is in the way, the best fit lies on it: so it is the best allowed one of those in which some of the
    limited costs are 0 and the others are free. What no network has is 0, too: the lean alone leaves it to rounding.
    """
    limited = [n for n in used if COSTS[n] in NEVER_NEGATIVE and rows[:, n].any()]
    free = [n for n in used if COSTS[n] not in NEVER_NEGATIVE]
    some = chain.from_iterable(combinations(limited, count) for count in range(len(limited), -1, -1))
    matrix, wanted = _leaning(rows, latencies)
    fits = [_solve(matrix, wanted, sorted([*free, *columns])) for columns in some]
    return min((fit for fit in fits if (fit[0][limited] >= 0).all()), key=lambda fit: fit[1])[0]


def _leaning(rows: Floats, latencies: Floats) -> tuple[Floats, Floats]:
    """The least squares of the relative errors: a matrix and what it should give. Every cost has a row that leans
    towards the times as they are.

    There are few networks and the features move together, so a free fit would swing; what the networks do not decide
    stays at slope 1 and nothing else.
    """
    # In units in which every feature is about 1 and every latency is 1.
    scale = np.maximum(np.abs(rows).mean(axis=0), 1e-12)
    lean = np.sqrt(TRUST) * scale / float(latencies.mean())
    prior = np.array([float(name == "slope") for name in COSTS])
    matrix = np.vstack([rows / latencies[:, None], np.diag(lean)])
    return matrix, np.concatenate([np.ones(len(latencies)), lean * prior])


def _solve(matrix: Floats, wanted: Floats, columns: list[int]) -> tuple[Floats, float]:
    """The best costs if all but these are 0, and the sum of the squares that is left: that of every row, so that two
    of them compare."""
    theta = np.zeros(matrix.shape[1])
    theta[columns] = np.linalg.lstsq(matrix[:, columns], wanted, rcond=None)[0]
    return theta, float(np.square(matrix @ theta - wanted).sum())


# Reasons to doubt a latency table: it does not fit whole networks, or it was measured in two different hours.

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
    traced: TracedNetwork,
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
        with held({key: build_block(traced, backend, blocks[key])}) as again:
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
