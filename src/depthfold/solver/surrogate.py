"""Fit the surrogate to the scores of trained plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from depthfold.core import Surrogate, TrainedPlan
from depthfold.errors import InvalidValue
from depthfold.stage_one import Floats

FEWEST = 4  # plans; the model has three coefficients
ROUNDING = 1e-9  # of the range of the predictions

# Returns the three coefficients of a surrogate, from a design with rows (1, importance, blocks) and the scores.
Fit = Callable[[Floats, Floats], Floats]


def fit_to_plans(
    plans: Sequence[TrainedPlan], *, network: str = "", fingerprint: str = "", provenance: str = ""
) -> Surrogate:
    """Return the fit that best orders plans to which it was not fitted.

    There are three fits: by least squares, by ranks, and by least squares without the number of blocks. The two
    explaining variables often rise together, so a fit could trade one for the other; and a few plans that have lost all
    their accuracy can decide the least squares, which are then wrong for the plans that one would use. So each plan is
    left out once, and the fits to the others order it among them. The slope must be positive: if it is in no fit,
    InvalidValue is raised.
    """
    if len(plans) < FEWEST:
        raise InvalidValue(f"A surrogate is fitted to at least {FEWEST} trained plans, found {len(plans)}. Train more.")
    design = np.array([(1.0, plan.importance, plan.blocks) for plan in plans])
    scores = np.array([plan.score for plan in plans])
    fits: tuple[Fit, ...] = (_least_squares, _by_ranks, _without_blocks)
    found = [(_tau_of_left_out(fit, design, scores), fit(design, scores).tolist()) for fit in fits]
    allowed = [(tau, coefficients) for tau, coefficients in found if coefficients[1] > 0]
    if not (allowed and np.ptp(design[:, 1]) and np.ptp(scores)):
        raise InvalidValue(
            f"The importances do not predict the scores of the {len(plans)} trained plans: plans with a higher "
            "importance do not have higher scores. Train the plans for longer, or measure the importances with another "
            "method."
        )
    tau, (intercept, slope, per_block) = max(allowed, key=lambda one: one[0])
    return Surrogate(
        intercept=intercept, slope=slope, per_block=per_block, tau=tau, plans=tuple(plans), network=network,
        fingerprint=fingerprint, provenance=provenance,
    )  # fmt: skip


def _least_squares(design: Floats, scores: Floats) -> Floats:
    if not np.ptp(design[:, 2]):  # then the blocks are part of the intercept
        return _without_blocks(design, scores)
    return np.asarray(np.linalg.lstsq(design, scores, rcond=None)[0], dtype=np.float64)


def _without_blocks(design: Floats, scores: Floats) -> Floats:
    return np.append(np.linalg.lstsq(design[:, :2], scores, rcond=None)[0], 0.0)


def _by_ranks(design: Floats, scores: Floats) -> Floats:
    """Return the fit in which a block is worth as much importance as orders most pairs of plans by their scores.

    This is the maximum rank correlation estimator (Han, 1987). It assumes that the score rises with importance + ratio
    * blocks, but not that it does so linearly. Several ranges of the ratio can be equally good: the middle one is used,
    the upper of two. If the plans are ordered best by minus the importance, the slope is negative.
    """
    first, second = np.triu_indices(len(scores), 1)
    better = np.sign(scores[first] - scores[second])
    by_importance, by_blocks = (design[first, column] - design[second, column] for column in (1, 2))
    differ = by_blocks != 0
    if not differ.any():
        return _without_blocks(design, scores)
    swaps = np.unique(-by_importance[differ] / by_blocks[differ])  # ratios at which two plans change places
    swaps = swaps[np.append(True, np.diff(swaps) > ROUNDING * np.ptp(swaps))]  # importances are sums
    margin = np.ptp(swaps) or abs(swaps[0]) or 1.0  # in the unit of the importances
    ratios = np.array([swaps[0] - margin, *((swaps[1:] + swaps[:-1]) / 2), swaps[-1] + margin])
    ordered = np.sign(by_importance + ratios[:, None] * by_blocks) @ better
    best = ratios[ordered == ordered.max()] if ordered.max() >= -ordered.min() else ratios[ordered == ordered.min()]
    ratio = best[len(best) // 2]
    index = design[:, 1] + ratio * design[:, 2]
    intercept, slope, _ = _without_blocks(np.column_stack((design[:, 0], index)), scores)
    return np.array((intercept, slope, slope * ratio))


def _tau_of_left_out(fit: Fit, design: Floats, scores: Floats) -> float:
    """Return Kendall's tau of the pairs of a plan and another one, as a fit without the first plan predicts them.

    Pairs with equal scores do not count. Those with equal predictions do, as neither right nor wrong, so that the taus
    of two models can be compared. Importances are sums, so predictions are equal up to rounding.
    """
    right, pairs = 0.0, 0
    for n in range(len(scores)):
        others = np.arange(len(scores)) != n
        line = design @ fit(design[others], scores[others])
        predicted, given = line[n] - line[others], scores[n] - scores[others]
        predicted[np.abs(predicted) < ROUNDING * np.ptp(line)] = 0.0
        right += float(np.sign(predicted) @ np.sign(given))
        pairs += int(np.count_nonzero(given))
    return right / pairs if pairs else 0.0
