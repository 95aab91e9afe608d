"""solve(): from the two tables to the frontier."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal, get_args

from depthfold.core import (
    NOTHING,
    BlockOption,
    ConvShape,
    FlaggedSpan,
    Frontier,
    ImportanceTable,
    LatencyTable,
    Network,
    Segment,
    Span,
    Surrogate,
)
from depthfold.core.latency_table import sum_times
from depthfold.errors import InvalidValue
from depthfold.solver.checks import check_options, check_scored, check_tables, check_timed, no_plan
from depthfold.solver.edges import Separate, StageOne, UsedSegment
from depthfold.solver.implausible import warn_if_implausible
from depthfold.solver.joint import Joint
from depthfold.solver.objective import checked_alpha, importance_array, objective
from depthfold.solver.plans import points
from depthfold.solver.stage_two import algorithm_2_and_4
from depthfold.stage_one import LEFT_OUT, Shapes, Times, time_array, useless_options
from depthfold.support.text import count

# Where merging stops: at a free choice of S, or at the boundaries B between the blocks of the importance table.
MergeAlong = Literal["S", "B"]


def solve(
    latency: LatencyTable,
    importance: ImportanceTable,
    *,
    alpha: float | None = None,
    surrogate: Surrogate | None = None,
    network: Network | None = None,
    merge_along: MergeAlong = "S",
) -> Frontier:
    """Return the Pareto-optimal plans in latency and importance (Eq. 4, or Eq. 16 with flags).

    The frontier is exact. Of plans with equal latency and importance, one is returned.

    `alpha` normalises the importances first (Appendix B.3). A `surrogate` that was fitted to trained plans takes the
    place of alpha: the importance of a plan is then its predicted score, less the intercept. With the `network` the
    tables are checked against it, and the plans have the shapes of their segments. With `merge_along` = "B", every
    block of the importance table is one segment: LayerMerge's rule, in place of the free choice of S.

    If entries of the tables drop layers or branches, the network is needed, and the plans say what they drop.
    """
    alpha = None if alpha is None else checked_alpha(alpha)
    if surrogate is not None:
        _check_surrogate(surrogate, alpha, importance)
    _check_rule(merge_along)
    check_tables(latency, importance, network)
    shapes = _checked_shapes(latency, importance, network)
    if network is not None and latency.activations is None:
        latency = replace(latency, activations=network.activations)
    if network is not None:
        _warn_if_needed(latency, importance, network)
    importances, per_block = objective(importance, alpha, surrogate)
    if per_block < 0:
        _warn_about_fewer_blocks(per_block, alpha, importance)
    if merge_along == "B":
        _warn_about_fixed_cuts(importance)

    # Stage one may take more than a minute and much memory, so what can be checked without it is checked before.
    if shapes is None:
        check_timed(latency)
    check_scored((block for block, _ in importances), latency.depth)
    times = Times(latency, shapes)
    stage_one: StageOne
    if shapes is None and merge_along == "S":  # the algorithms of the paper, which are much faster
        stage_one = Separate(time_array(latency), importance_array(importances, latency.depth))
    else:
        stage_one = Joint(times, latency.depth, importances, whole_blocks=merge_along == "B")
    fronts = algorithm_2_and_4(stage_one.edges, latency.depth)
    if latency.depth not in fronts:
        raise no_plan()
    plans, used = points(fronts, stage_one, latency.depth, shapes.drops if shapes else None)
    warn_if_implausible(latency, importance, plans[-1])
    return Frontier(
        network=latency.network or importance.network or (network.name if network else ""),
        fingerprint=latency.fingerprint or importance.fingerprint or (network.fingerprint if network else ""),
        depth=latency.depth,
        environment=latency.environment,
        original=latency.original,
        alpha=alpha,
        surrogate=surrogate,
        segments=_segments(used, times, network),
        points=plans,
        unscored=_unscored(importance),
        quantity=importance.quantity,
    )


def _checked_shapes(latency: LatencyTable, importance: ImportanceTable, network: Network | None) -> Shapes | None:
    """Return the shapes of the network if the tables drop layers, otherwise None."""
    if not (latency.drops or importance.drops):
        return None
    if network is None:
        raise InvalidValue(
            "The tables have entries with dropped layers, and the shapes of the segments then depend on the network. "
            "Pass it to solve() as network=."
        )
    shapes = Shapes(network)
    check_options(latency, importance, shapes)
    return shapes


def _check_rule(merge_along: object) -> None:
    if merge_along not in get_args(MergeAlong):
        known = ", ".join(map(repr, get_args(MergeAlong)))
        raise InvalidValue(f"merge_along must be one of {known}, found {merge_along!r}.")


def _warn_if_needed(latency: LatencyTable, importance: ImportanceTable, network: Network) -> None:
    """Warn about blocks that were left out of the importance table for another latency table, but save time here."""
    left_out = {BlockOption(entry.span, entry.dropped) for entry in importance.entries if entry.reason in LEFT_OUT}
    if not left_out:
        return
    options = [BlockOption(entry.span, entry.dropped) for entry in importance.entries]
    needed = sorted(left_out - useless_options(network, latency, options))
    if needed:
        warnings.warn(
            f"The importance table leaves out {count(len(needed), 'block')} that saved no time with another latency "
            f"table, but may save time with this one; the first is {needed[0]}. Measure the importances again with "
            "this latency table; only the missing ones are measured.",
            UserWarning,
            stacklevel=3,
        )


def _warn_about_fewer_blocks(per_block: float, alpha: float | None, importance: ImportanceTable) -> None:
    """Warn if blocks were left out, and the objective prefers fewer blocks: plans may be better with a merged block."""
    if left_out := sum(entry.reason in LEFT_OUT for entry in importance.entries):
        why = f"the surrogate predicts lower scores for more blocks (per_block = {per_block:.3g})"
        if alpha is not None:
            why = f"alpha = {alpha:g} lowers the importance of every block by {-per_block:.3g}"
        warnings.warn(
            f"The importance table leaves out {count(left_out, 'block')} whose merging saves no time, but {why}, so "
            "plans with them may be better. Measure the importances without a latency table to include them.",
            UserWarning,
            stacklevel=3,
        )


def _warn_about_fixed_cuts(importance: ImportanceTable) -> None:
    """Warn if blocks were left out: that they save no time holds only if S is free."""
    if left_out := sum(entry.reason in LEFT_OUT for entry in importance.entries):
        warnings.warn(
            f"The importance table leaves out {count(left_out, 'block')} that save no time if S is free, but with "
            'merge_along="B" plans with them may be better. Measure the importances without a latency table to include '
            "them.",
            UserWarning,
            stacklevel=3,
        )


def _check_surrogate(surrogate: Surrogate, alpha: float | None, importance: ImportanceTable) -> None:
    if alpha is not None:
        raise InvalidValue(
            f"A fitted surrogate takes the place of alpha, found both (alpha = {alpha:g}). Give one of them."
        )
    if surrogate.fingerprint and importance.fingerprint and surrogate.fingerprint != importance.fingerprint:
        raise InvalidValue(
            f"The surrogate was fitted for another network ({surrogate.network or surrogate.fingerprint}; the "
            f"importance table is for {importance.network or importance.fingerprint}). Fit it for this network."
        )


def _unscored(importance: ImportanceTable) -> tuple[FlaggedSpan, ...]:
    """Return the blocks without a score, those that no option gives one."""
    scored = {entry.span for entry in importance.entries if entry.samples}
    return tuple(dict.fromkeys(entry.span for entry in importance.entries if entry.span not in scored))


def _segments(used: Iterable[UsedSegment], times: Times, network: Network | None) -> tuple[Segment, ...]:
    """Return every segment of every plan once, with its shape if the network is known."""
    layers, shapes = times.latency.layers, times.shapes
    segments = []
    for i, j, mask in used:
        span = Span(i, j)
        replaced = [time for time in layers[i:j] if time is not None]
        both = times.milliseconds(i, j, mask)
        assert both is not None  # a plan merges only segments that have times
        segments.append(
            Segment(
                span=span,
                times=both,
                replaced=sum_times(replaced) if len(replaced) == len(span) else None,
                shape=_shape(span, mask, shapes, network),
                dropped=shapes.drops(mask) if shapes else NOTHING,
            )
        )
    return tuple(segments)


def _shape(span: Span, mask: int, shapes: Shapes | None, network: Network | None) -> ConvShape | None:
    if shapes is not None:
        return shapes.shape(span.i, span.j, mask)
    return network.merged_shape(span) if network else None
