"""Fit the times of blocks measured alone to the latencies of whole networks, and warn if the fit is poor.

A block that runs alone pays for its own launch, and often for converting its input and output to the layout that the
runtime prefers. Inside a network it does not. It is also timed with an activation that a plan may leave out, or without
one that a plan may insert. These costs depend on the runtime, so they are fitted to networks that were timed.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from depthfold.core import Calibration, Position, Span, Timing
from depthfold.latency.blocks import BlockShape

Floats = NDArray[np.float64]
Blocks = Mapping[Span, BlockShape]
TimesAlone = Mapping[Span, float]  # in milliseconds
Kinds = tuple[str, ...]  # of activations

# What is fitted, and what of it can be negative. A block reads what the one before it has written, so the sums of the
# numbers read and written differ by the same amount in all networks. A fit cannot tell the two costs apart; with both,
# it would hide a cost `outside` below 0 in their difference.
FITTED = ("slope", "per_segment", "per_element", "outside", "per_activation")
MAY_BE_NEGATIVE = frozenset({"per_segment", "per_element"})
# The weight of the prior (slope 1, all other costs 0) relative to the networks.
PRIOR_WEIGHT = 1e-4
# Fit the cost of activations only if this many networks differ from their blocks in activations: with two, the fit
# took noise for a cost.
MIN_DIFFERING = 3
# At most this many kinds of activations have a cost of their own: the fit tries every subset of the bounded costs.
MAX_KINDS = 5
# A larger median error means that something else ran on the machine, or that latencies are not sums on this runtime.
# On idle machines it is 0.2 to 4 %.
MAX_MEDIAN_ERROR = 0.05
# A network that was timed while the machine was busy can spoil the fit, although most others still agree with it.
# On idle machines the worst error is at most 12 %.
MAX_WORST_ERROR = 0.2
# If layers with more than this share of the time of all single layers have the least cost, a warning says so. It is 0
# in most tables of idle machines.
MAX_FLOORED = 0.25


class DoubtfulTable(UserWarning):
    """The table predicts latencies poorly: the calibration does not fit, or the speed of the machine changed."""


@dataclass(frozen=True, slots=True)
class TimedNetwork:
    """A whole network that was timed: segments, latency in milliseconds, and the positions of its activations."""

    segments: tuple[Span, ...]
    latency: float
    activations: frozenset[Position]


@dataclass(frozen=True, slots=True)
class Samples:
    """What a calibration is fitted to: networks, their blocks, and the times of these alone.

    `kinds` are the kinds of the activations that the network has after each layer, or that a plan would insert there.
    """

    networks: Sequence[TimedNetwork]
    blocks: Blocks
    times: TimesAlone
    kinds: Kinds

    def extra(self, span: Span, network: TimedNetwork) -> int:
        """Return how many more elements pass an activation in a network than in the block of the span."""
        return self.blocks[span].extra_activations(span.j in network.activations)

    def extra_by_kind(self, network: TimedNetwork) -> Counter[str]:
        """Return the sums of extra() over the segments that differ from their blocks, by kind."""
        found: Counter[str] = Counter()
        for span in network.segments:
            if extra := self.extra(span, network):
                found[kind_at(span, self.kinds)] += extra
        return found

    def row(self, network: TimedNetwork, own: Kinds) -> list[float]:
        """Return the factor of each cost: those of FITTED, and those of the kinds that have their own."""
        elements = [self.blocks[span].elements for span in network.segments]
        extra = self.extra_by_kind(network)
        by_kind = [extra.pop(kind, 0) / 1e6 for kind in own]
        return [
            sum(self.times[span] for span in network.segments),
            float(len(network.segments)),
            sum(map(sum, elements)) / 1e6,
            1.0,
            extra.total() / 1e6,
            *by_kind,
        ]

    def predict(self, calibration: Calibration, network: TimedNetwork) -> float:
        """Return the latency that the table will predict. Unlike the linear fit, the table has a minimum per block."""
        inside = (
            calibration.of_kind(kind_at(span, self.kinds)).in_context(
                self.times[span], *self.blocks[span].elements, self.extra(span, network)
            )
            for span in network.segments
        )
        return calibration.outside + sum(inside)


def kind_at(span: Span, kinds: Kinds) -> str:
    """Return the kind of the activation at the end of a span."""
    return kinds[span.j - 1]


def fit(samples: Samples) -> Calibration:
    """Return the calibration with the smallest relative errors.

    It includes a cost of activations, or one for each kind, only if this improves the prediction of networks that the
    fit has not seen. Otherwise it would fit noise on a runtime where activations cost nothing.
    """
    without = _fit(samples, activations=False)
    differing = [tuple(samples.extra_by_kind(network)) for network in samples.networks]
    if sum(map(bool, differing)) < MIN_DIFFERING:
        return replace(without[0], per_activation=None)
    found = [without, _fit(samples)]
    if own := _kinds_of_their_own(differing):
        found.append(_fit(samples, own))
    return min(found, key=lambda one: one[1])[0]


def _kinds_of_their_own(differing: Sequence[Kinds]) -> Kinds:
    """Return the kinds that can have a cost of their own. All others share one.

    `differing` are the kinds in which each network differs from its blocks. Enough networks must differ in a kind, and
    there must be as many networks as costs.
    """
    most = min(MAX_KINDS, len(differing) - len(FITTED) + 1)
    counts = Counter(chain.from_iterable(differing)).most_common(max(most, 0))
    return tuple(kind for kind, count in counts if count >= MIN_DIFFERING)[1:]


def is_inaccurate(calibration: Calibration) -> bool:
    """Return True if the median error is too large."""
    return calibration.median_error > MAX_MEDIAN_ERROR


def warn_if_inaccurate(calibration: Calibration, journal: Path | None) -> None:
    """Give the caller of measure_latency() a DoubtfulTable warning if the median or the worst error is too large."""
    doubtful = is_inaccurate(calibration)
    if doubtful or calibration.worst_error > MAX_WORST_ERROR:
        what = "is doubtful" if doubtful else "mispredicts a network"
        go_on = "go on with allow_doubtful=True (--allow-doubtful)" if doubtful else "go on with it"
        delete = "" if journal is None else f" delete {describe_journal(journal)}, and"
        warnings.warn(
            f"The latency table {what}: it is {calibration}. If something else ran on this machine,{delete} "
            f"measure again; otherwise {go_on}, because plans are chosen by timing whole networks.",
            DoubtfulTable,
            stacklevel=3,
        )


def warn_if_floored(entries: Iterable[Timing], journal: Path | None) -> None:
    """Give the caller of measure_latency() a DoubtfulTable warning if many layers have the least cost of a block.

    Whole networks may be predicted well all the same, but not what a plan saves by merging or dropping such a layer.
    """
    layers = [entry for entry in entries if len(entry.span) == 1 and entry.shape is None and entry.quartiles]
    alone = sum(entry.quartiles[1] for entry in layers if entry.quartiles)
    floored = [entry for entry in layers if any(entry.floored)]
    if sum(entry.quartiles[1] for entry in floored if entry.quartiles) > MAX_FLOORED * alone:
        delete = "" if journal is None else f" delete {describe_journal(journal)}, and"
        warnings.warn(
            f"The latency table gives {len(floored)} of {len(layers)} single layers the least cost, so it undervalues "
            f"merging or dropping them. If something else ran on this machine,{delete} measure again.",
            DoubtfulTable,
            stacklevel=3,
        )


def describe_journal(path: Path | None) -> str:
    return f"the journal {path} (and latency.json beside it)"


def _fit(samples: Samples, own: Kinds = (), *, activations: bool = True) -> tuple[Calibration, float]:
    """Return the best calibration with these costs, and the sum of its squared errors.

    The error of a network is that of predicting it from a fit to all the others.
    """
    networks = samples.networks
    rows = np.array([samples.row(network, own) for network in networks])
    latencies = np.array([network.latency for network in networks])
    used = tuple(range(rows.shape[1] if activations else len(FITTED) - 1))
    errors = []
    for n, network in enumerate(networks):
        others = np.arange(len(networks)) != n
        guess = _calibration(_solve_within(rows[others], latencies[others], used), own, [0.0] * len(networks))
        errors.append(abs(samples.predict(guess, network) / network.latency - 1.0))
    return _calibration(_solve_within(rows, latencies, used), own, errors), float(np.square(errors).sum())


def _calibration(theta: Floats, own: Kinds, errors: Sequence[float]) -> Calibration:
    slope, per_segment, per_element, outside, per_activation, *per_kind = theta.tolist()
    return Calibration(
        slope=slope, per_segment=per_segment, per_read=per_element, per_write=per_element, outside=outside,
        per_activation=per_activation, per_kind=tuple(zip(own, per_kind, strict=True)), networks=len(errors),
        median_error=median(errors), worst_error=max(errors),
    )  # fmt: skip


def _solve_within(rows: Floats, latencies: Floats, used: tuple[int, ...]) -> Floats:
    """Return the best costs in which only those of MAY_BE_NEGATIVE are negative.

    If a bound is active, the best fit lies on it. So try every subset of the bounded costs as the free ones, with the
    rest at 0, and take the best feasible fit. A cost that no network has is also 0.
    """
    free = [n for n, name in enumerate(FITTED) if name in MAY_BE_NEGATIVE]
    bounded = [n for n in used if n not in free and rows[:, n].any()]
    subsets = chain.from_iterable(combinations(bounded, count) for count in range(len(bounded), -1, -1))
    matrix, target = _with_prior(rows, latencies)
    fits = [_solve(matrix, target, sorted([*free, *columns])) for columns in subsets]
    return min((fit for fit in fits if (fit[0][bounded] >= 0).all()), key=lambda fit: fit[1])[0]


def _with_prior(rows: Floats, latencies: Floats) -> tuple[Floats, Floats]:
    """Return the least-squares problem of the relative errors, with one row per cost for the prior.

    There are few networks and their features are correlated. Where the networks do not determine a cost, the prior
    keeps it near its default: slope 1, everything else 0.
    """
    # In units in which every feature is about 1 and every latency is 1.
    scale = np.maximum(np.abs(rows).mean(axis=0), 1e-12)
    weight = np.sqrt(PRIOR_WEIGHT) * scale / float(latencies.mean())
    prior = np.zeros(rows.shape[1])
    prior[FITTED.index("slope")] = 1.0
    matrix = np.vstack([rows / latencies[:, None], np.diag(weight)])
    return matrix, np.concatenate([np.ones(len(latencies)), weight * prior])


def _solve(matrix: Floats, target: Floats, columns: list[int]) -> tuple[Floats, float]:
    """Return the best costs if all but these columns are 0, and the sum of squares over all rows."""
    theta = np.zeros(matrix.shape[1])
    theta[columns] = np.linalg.lstsq(matrix[:, columns], target, rcond=None)[0]
    return theta, float(np.square(matrix @ theta - target).sum())
