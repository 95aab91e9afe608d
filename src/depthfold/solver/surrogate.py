"""Fit the surrogate to the scores of trained plans."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from depthfold.core import Surrogate, TrainedPlan
from depthfold.errors import InvalidValue
from depthfold.stage_one import Floats

FEWEST = 4  # plans; the model has three coefficients
ROUNDING = 1e-9  # of the range of the predictions


def fit_to_plans(
    plans: Sequence[TrainedPlan], *, network: str = "", fingerprint: str = "", provenance: str = ""
) -> Surrogate:
    """Return the least-squares fit of the plans' scores, without the number of blocks if this orders plans better.

    The two explaining variables often rise together, so a fit could trade one for the other. And a few plans that have
    lost all their accuracy can decide the fit, which is then wrong for the plans that one would use. So each plan is
    left out once, and the fits to the others, with and without the number of blocks, order it among them. The slope
    must be positive: if it is in neither fit, InvalidValue is raised.
    """
    if len(plans) < FEWEST:
        raise InvalidValue(f"A surrogate is fitted to at least {FEWEST} trained plans, found {len(plans)}. Train more.")
    design = np.array([(1.0, plan.importance, plan.blocks) for plan in plans])
    scores = np.array([plan.score for plan in plans])
    choices = (3, 2) if np.ptp(design[:, 2]) else (2,)  # columns of the design
    fits = [(*_fit(design[:, :columns], scores).tolist(), 0.0)[:3] for columns in choices]
    taus = [_tau_of_left_out(design[:, :columns], scores) for columns in choices]
    allowed = [(tau, fit) for tau, fit in zip(taus, fits, strict=True) if fit[1] > 0]
    if not allowed:
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


def _fit(design: Floats, scores: Floats) -> Floats:
    return np.asarray(np.linalg.lstsq(design, scores, rcond=None)[0], dtype=np.float64)


def _tau_of_left_out(design: Floats, scores: Floats) -> float:
    """Return Kendall's tau of the pairs of a plan and another one, as a fit without the first plan predicts them.

    Pairs with equal scores do not count. Those with equal predictions do, as neither right nor wrong, so that the taus
    of two models can be compared. Importances are sums, so predictions are equal up to rounding.
    """
    right, pairs = 0.0, 0
    for n in range(len(scores)):
        others = np.arange(len(scores)) != n
        line = design @ _fit(design[others], scores[others])
        predicted, given = line[n] - line[others], scores[n] - scores[others]
        predicted[np.abs(predicted) < ROUNDING * np.ptp(line)] = 0.0
        right += float(np.sign(predicted) @ np.sign(given))
        pairs += int(np.count_nonzero(given))
    return right / pairs if pairs else 0.0
