"""The two stages put together."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable

from depthfold.core import Frontier, ImportanceTable, LatencyTable, Network, Position, Segment, Span
from depthfold.errors import InvalidValue
from depthfold.solver.arrays import (
    Floats,
    from_lattice,
    importance_array,
    latency_array,
    lattice_exponent,
    on_lattice,
)
from depthfold.solver.checks import check_covered, check_kinds, check_tables, no_plan
from depthfold.solver.fit import check_fit, check_network
from depthfold.solver.normalise import Normalisation, checked_alpha, normalised
from depthfold.solver.plans import Tables, points
from depthfold.solver.resolution import check_base, check_resolution
from depthfold.solver.stage_one import best_blocks, both_flags
from depthfold.solver.stage_two import pareto_labels
from depthfold.support.coerce import as_float
from depthfold.support.text import at_most


def solve(
    latency: LatencyTable,
    importance: ImportanceTable,
    *,
    alpha: float | None = None,
    normalisation: Normalisation | None = None,
    network: Network | None = None,
    original: float | None = None,
    max_labels: int = 50_000,
) -> Frontier:
    """Every plan that no other plan beats in both latency and importance.

    `alpha` and `normalisation` ("single" unless you say otherwise) even out the importances first (Appendix B.3);
    without alpha they stay as they are.
    With the `network` the tables are checked against it and the plans name the shapes that their segments become.
    `original` is the measured latency of the original, which shares and speed-ups refer to; without it, that is the
    sum of the single layers in the latency table. At most `max_labels` labels are kept for each position. Where that
    thins them out, a warning says so, and `frontier.lost` bounds the importance that was lost.
    """
    if type(max_labels) is not int or max_labels < 1:
        raise InvalidValue(f"max_labels must be a whole number from 1 on, found {max_labels!r}.")
    original = None if original is None else _checked_original(original)
    alpha = None if alpha is None else checked_alpha(alpha)
    if alpha is None and normalisation is not None:
        raise InvalidValue(
            f"The normalisation {normalisation!r} needs alpha, which says how much of the mean is subtracted. Give "
            "it (the paper uses 1.2 to 1.8), or leave out both."
        )
    _check(latency, importance, network)
    depth = latency.depth

    T = latency_array(latency)
    I, I_exponent = _importances(importance, depth, alpha, normalisation or "single")
    T_opt, S_opt, M_opt = both_flags(T)
    I_opt, B_opt = best_blocks(on_lattice(I, I_exponent))
    check_covered(T_opt.units[0], I_opt)
    labels = pareto_labels(T_opt, I_opt, max_labels)
    if labels.final.start == labels.final.stop:
        raise no_plan()

    found, used = points(labels, Tables(T=T, I=I, S_opt=S_opt, M_opt=M_opt, B_opt=B_opt))
    # On the lattice the sums of two plans are off by at most L/2 units each, and their floats by less than one more.
    lost = math.nextafter(from_lattice(labels.lost + depth + 1, I_exponent), math.inf) if labels.lost else 0.0
    if lost:
        warnings.warn(
            f"The frontier is thinned to {max_labels} labels for each position: at any budget its plan may be up to "
            f"{at_most(lost)} of importance below the best one. Raise max_labels for an exact frontier.",
            RuntimeWarning,
            stacklevel=2,
        )
    return Frontier(
        network=latency.network or importance.network or (network.name if network else ""),
        fingerprint=latency.fingerprint or importance.fingerprint or (network.fingerprint if network else ""),
        depth=depth,
        environment=latency.environment,
        original=latency.original if original is None else original,
        alpha=alpha,
        normalisation=None if alpha is None else normalisation or "single",
        lost=lost,
        segments=_segments(used, latency, network),
        points=found,
        unscored=tuple(entry.span for entry in importance.entries if not entry.samples),
    )


def _checked_original(original: object) -> float:
    what, expected = "The latency of the original", "positive milliseconds"
    value = as_float(what, original, InvalidValue, expected)
    if not (math.isfinite(value) and value > 0):
        raise InvalidValue(f"{what} must be {expected}, found {original!r}.")
    return value


def _check(latency: LatencyTable, importance: ImportanceTable, network: Network | None) -> None:
    check_kinds(latency, importance)
    if network is not None:
        check_network(latency, importance, network)
    check_tables(latency, importance)
    check_base(importance)
    if network is not None:
        check_fit(latency, importance, network)


def _importances(
    importance: ImportanceTable, depth: Position, alpha: float | None, over: Normalisation
) -> tuple[Floats, int]:
    """I, normalised if alpha is given, and the exponent of its lattice."""
    given = importance.importances
    I = importance_array(given, depth)
    exponent = lattice_exponent(I)
    check_resolution(given, exponent, depth)
    if alpha is not None:
        I = importance_array(normalised(given, alpha, over), depth)
        exponent = lattice_exponent(I)
        check_resolution(given, exponent, depth, alpha)
    return I, exponent


def _segments(
    used: Iterable[tuple[Position, Position]], latency: LatencyTable, network: Network | None
) -> tuple[Segment, ...]:
    """Every segment of every plan, once: what it takes, what it replaces, and its shape if the network is known."""
    times, active, bare = latency.times, latency.times_if(True), latency.times_if(False)
    singles = [times.get(Span(l - 1, l), math.nan) for l in range(1, latency.depth + 1)]
    segments = []
    for i, j in used:
        span, replaced = Span(i, j), math.fsum(singles[i:j])
        segments.append(
            Segment(
                span=span,
                time=active[span],
                bare=bare[span] if bare[span] != active[span] else None,
                replaced=None if math.isnan(replaced) else replaced,
                shape=network.merged_shape(span) if network else None,
            )
        )
    return tuple(segments)
