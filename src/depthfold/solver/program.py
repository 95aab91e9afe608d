"""The two stages put together."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping

from depthfold.core import Frontier, ImportanceTable, LatencyTable, Network, Position, Segment, Span
from depthfold.errors import InvalidValue
from depthfold.solver.arrays import (
    Exact,
    from_lattice,
    importance_array,
    latency_array,
    lattice_exponent,
    on_lattice,
)
from depthfold.solver.checks import check_covered, check_tables, no_plan
from depthfold.solver.normalise import Normalisation, normalised
from depthfold.solver.plans import Tables, points
from depthfold.solver.stage_one import best_blocks, fastest_merging, merging_by_activations
from depthfold.solver.stage_two import pareto_labels


def solve(
    latency: LatencyTable,
    importance: ImportanceTable,
    *,
    alpha: float | None = None,
    normalisation: Normalisation = "single",
    network: Network | None = None,
    original: float | None = None,
    max_labels: int = 50_000,
) -> Frontier:
    """Every plan that no other plan beats in both latency and importance.

    `alpha` and `normalisation` even out the importances first (Appendix B.3); without alpha they stay as they are.
    With the `network` the tables are checked against it and the plans name the shapes that their segments become.
    `original` is the measured latency of the original, which shares and speed-ups refer to; without it, that is the
    sum of the single layers in the latency table. At most `max_labels` labels are kept for each position. Where that
    thins them out, a warning says so, and `frontier.lost` bounds the importance that was lost.
    """
    if type(max_labels) is not int or max_labels < 1:
        raise InvalidValue(f"max_labels must be a whole number from 1 on, found {max_labels!r}.")
    if original is not None and not (math.isfinite(original) and original > 0):
        raise InvalidValue(f"The latency of the original must be positive milliseconds, found {original!r}.")
    check_tables(latency, importance, network)
    depth, times, importances = latency.depth, latency.times, importance.importances
    if alpha is not None:
        importances = normalised(importances, alpha, normalisation)

    T = latency_array(times, depth)
    I = importance_array(importances, depth)
    I_exponent = lattice_exponent(I)
    T_opt, S_opt = fastest_merging(Exact.of(T))
    I_opt, B_opt = best_blocks(on_lattice(I, I_exponent))
    check_covered(T_opt.units, I_opt)
    labels = pareto_labels(T_opt, I_opt, max_labels)
    if labels.final.start == labels.final.stop:
        raise no_plan()

    found, used = points(labels, Tables(T=T, I=I, by_activations=merging_by_activations(T), S_opt=S_opt, B_opt=B_opt))
    lost = from_lattice(labels.lost, I_exponent)
    if lost:
        warnings.warn(
            f"The frontier is thinned to {max_labels} labels for each position: at any budget its plan may be up to "
            f"{lost:.4g} of importance below the best one. Raise max_labels for an exact frontier.",
            RuntimeWarning,
            stacklevel=2,
        )
    return Frontier(
        network=latency.network or importance.network or (network.name if network else ""),
        depth=depth,
        environment=latency.environment,
        original=latency.original if original is None else float(original),
        alpha=alpha,
        normalisation=None if alpha is None else normalisation,
        lost=lost,
        segments=_segments(used, times, depth, network),
        points=found,
    )


def _segments(
    used: Iterable[tuple[Position, Position]], times: Mapping[Span, float], depth: Position, network: Network | None
) -> tuple[Segment, ...]:
    """Every segment of every plan, once: what it takes, what it replaces, and its shape if the network is known."""
    singles = [times.get(Span(l - 1, l), math.nan) for l in range(1, depth + 1)]
    segments = []
    for i, j in used:
        span, replaced = Span(i, j), math.fsum(singles[i:j])
        segments.append(
            Segment(
                span=span,
                time=times[span],
                replaced=None if math.isnan(replaced) else replaced,
                shape=network.merged_shape(span) if network else None,
            )
        )
    return tuple(segments)
