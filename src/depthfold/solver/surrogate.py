"""Fit the surrogate to the scores of trained plans."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from depthfold.core import Surrogate, TrainedPlan
from depthfold.errors import InvalidValue
from depthfold.stage_one import Floats

FEWEST = 4  # plans; the model has three coefficients


def fit_to_plans(
    plans: Sequence[TrainedPlan], *, network: str = "", fingerprint: str = "", provenance: str = ""
) -> Surrogate:
    """Return the least-squares fit of the plans' scores, with the number of blocks if this orders plans better.

    The two explaining variables often rise together, so a fit could trade one for the other. And a few plans that have
    lost all their accuracy can decide the fit, which is then wrong for the plans that one would use. So each plan is
    left out once, and the fits to the others, with and without the number of blocks, order it among them. The fit with
    the higher Kendall's tau is returned. The slope must be positive: if it is in neither fit, InvalidValue is raised.
    """
    if len(plans) < FEWEST:
        raise InvalidValue(f"A surrogate is fitted to at least {FEWEST} trained plans, found {len(plans)}. Train more.")
    design = np.array([(1.0, plan.importance, plan.blocks) for plan in plans])
    scores = np.array([plan.score for plan in plans])
    fits = [(*_fit(design[:, :columns], scores).tolist(), 0.0)[:3] for columns in (3, 2)]
    taus = [_tau_of_left_out(design[:, :columns], scores) for columns in (3, 2)]
    allowed = [(tau, fit) for tau, fit in zip(taus, fits, strict=True) if fit[1] > 0]
    if not allowed:
        raise InvalidValue(
            f"The importances do not predict the scores of the {len(plans)} trained plans: plans with a higher "
            "importance have lower scores. Train the plans for longer, or measure the importances with another method."
        )
    tau, (intercept, slope, per_block) = max(allowed, key=lambda one: one[0])
    return Surrogate(
        intercept=intercept, slope=slope, per_block=per_block, tau=tau, plans=tuple(plans), network=network,
        fingerprint=fingerprint, provenance=provenance,
    )  # fmt: skip


def kendall_tau(one: Floats, two: Floats) -> float:
    """Return Kendall's tau-b of two sequences: 1 for the same order, -1 for the reverse, 0 if one is constant."""
    first, second = np.triu_indices(len(one), 1)
    return _agreement(one[first] - one[second], two[first] - two[second])


def _agreement(one: Floats, two: Floats) -> float:
    """Return how often two lists of differences have the same sign, from -1 to 1."""
    untied = float(np.sqrt(np.count_nonzero(one) * np.count_nonzero(two)))
    return float(np.sign(one) @ np.sign(two)) / untied if untied else 0.0


def _fit(design: Floats, scores: Floats) -> Floats:
    return np.asarray(np.linalg.lstsq(design, scores, rcond=None)[0], dtype=np.float64)


def _tau_of_left_out(design: Floats, scores: Floats) -> float:
    """Return Kendall's tau of the pairs of a plan and another one, as a fit without the first plan predicts them."""
    predicted, given = list[Floats](), list[Floats]()
    for n in range(len(scores)):
        others = np.arange(len(scores)) != n
        line = design @ _fit(design[others], scores[others])
        predicted.append(line[n] - line[others])
        given.append(scores[n] - scores[others])
    return _agreement(np.concatenate(predicted), np.concatenate(given))
