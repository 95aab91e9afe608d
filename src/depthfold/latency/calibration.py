"""From blocks timed alone to blocks in context: a fit over whole networks.

Timed alone, a block pays its own launch and often the conversion of its input and output to the layout that the
runtime likes; inside a network it does not. And it has its activation, which a plan may leave out. How much that is
depends on the runtime, so it is measured: some plans are built as whole networks and timed, and what the times of their
blocks do not explain is fitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from statistics import median

import numpy as np
from numpy.typing import NDArray

from depthfold.core import Calibration, Span
from depthfold.latency.blocks import BlockShape

Floats = NDArray[np.float64]

# How much the fit trusts that times alone are right: the weight of "slope 1 and nothing else" against the networks.
TRUST = 1e-4

# The features whose costs are 0 or more: what is outside the segments, and the activations that are left out.
LIMITED = range(4, 6)


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole network that was timed: its segments, its latency in milliseconds, and those of the segments that lack
    the activation of their blocks."""

    segments: tuple[Span, ...]
    latency: float
    bare: tuple[Span, ...] = ()


def fit(wholes: Sequence[Whole], blocks: Mapping[Span, BlockShape], times: Mapping[Span, float]) -> Calibration:
    """The calibration that explains the whole networks best, in relative error."""
    rows = np.array([_features(whole, blocks, times) for whole in wholes])
    latencies = np.array([whole.latency for whole in wholes])
    theta = _solve_within(rows, latencies)
    errors = []
    for n, whole in enumerate(wholes):
        others = np.arange(len(wholes)) != n
        without = _calibration(_solve_within(rows[others], latencies[others]), len(wholes), [0.0])
        errors.append(abs(_predicted(without, whole, blocks, times) / whole.latency - 1.0))
    return _calibration(theta, len(wholes), errors)


def _calibration(theta: Floats, networks: int, errors: Sequence[float]) -> Calibration:
    slope, per_segment, per_read, per_write, outside, per_activation = theta.tolist()
    return Calibration(
        slope=slope,
        per_segment=per_segment,
        per_read=per_read,
        per_write=per_write,
        outside=outside,
        networks=networks,
        median_error=median(errors),
        worst_error=max(errors),
        per_activation=per_activation,
    )


def _predicted(
    calibration: Calibration, whole: Whole, blocks: Mapping[Span, BlockShape], times: Mapping[Span, float]
) -> float:
    """As the table has it, not as the fit has it: there, no block costs less than a share of its time alone."""
    total = calibration.outside
    for span in whole.segments:
        read, written = blocks[span].elements
        total += calibration.in_context(times[span], read, written, written if span in whole.bare else 0)
    return total


def _features(whole: Whole, blocks: Mapping[Span, BlockShape], times: Mapping[Span, float]) -> list[float]:
    elements = [blocks[span].elements for span in whole.segments]
    return [
        sum(times[span] for span in whole.segments),
        float(len(whole.segments)),
        sum(read for read, _ in elements) / 1e6,
        sum(written for _, written in elements) / 1e6,
        1.0,
        -sum(blocks[span].elements[1] for span in whole.bare) / 1e6,
    ]


def _solve_within(rows: Floats, latencies: Floats) -> Floats:
    """The best fit in which neither what is outside the segments nor an activation costs less than nothing: the table
    could not hold the one, and the other makes no sense.

    Where a limit is in the way, the best fit lies on it: so it is the best allowed one of those in which some of the
    limited costs are 0 and the others are free. What no network has is 0, too: the lean alone leaves it to rounding.
    """
    limited = [n for n in LIMITED if rows[:, n].any()]
    some = chain.from_iterable(combinations(limited, count) for count in range(len(limited), -1, -1))
    fits = [_solve(rows, latencies, (*range(LIMITED.start), *columns)) for columns in some]
    return min((fit for fit in fits if (fit[0][limited] >= 0).all()), key=lambda fit: fit[1])[0]


def _solve(rows: Floats, latencies: Floats, columns: tuple[int, ...]) -> tuple[Floats, float]:
    """Least squares of the relative errors with these features, leaning towards the times as they are; and the sum of
    the squares.

    There are few networks and the features move together, so a free fit would swing; what the networks do not decide
    stays at slope 1 and nothing else.
    """
    theta = np.zeros(rows.shape[1])
    rows = rows[:, columns]
    scale = np.maximum(np.abs(rows).mean(axis=0), 1e-12)
    prior = np.zeros(rows.shape[1])
    prior[0] = 1.0
    # In units in which every feature is about 1 and every latency is 1.
    matrix = rows / latencies[:, None]
    typical = float(latencies.mean())
    lean = np.diag(np.sqrt(TRUST) * scale / typical)
    whole = np.vstack([matrix, lean])
    wanted = np.concatenate([np.ones(len(latencies)), lean @ prior])
    found = np.linalg.lstsq(whole, wanted, rcond=None)[0]
    theta[list(columns)] = found
    return theta, float(np.square(whole @ found - wanted).sum())
