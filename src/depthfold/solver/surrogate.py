"""Fit the surrogate to the scores of trained plans."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from depthfold.core import Surrogate, TrainedPlan
from depthfold.errors import InvalidValue
from depthfold.stage_one import Floats

FEWEST = 4  # plans; the model has three coefficients


def fit_to_plans(
    plans: Sequence[TrainedPlan], *, network: str = "", fingerprint: str = "", provenance: str = ""
) -> Surrogate:
    """Return the least-squares fit of the plans' scores.

    The two explaining variables often rise together, so a fit could trade one for the other and end with a negative
    slope. The slope is what the importances were measured for: if it is not positive, the fit without the number of
    blocks is used, and if that has no positive slope either, InvalidValue is raised.
    """
    if len(plans) < FEWEST:
        raise InvalidValue(f"A surrogate is fitted to at least {FEWEST} trained plans, found {len(plans)}. Train more.")
    design = np.array([(1.0, plan.importance, plan.blocks) for plan in plans])
    scores = np.array([plan.score for plan in plans])
    for columns in (3, 2):
        intercept, slope, *rest = _fit(design[:, :columns], scores).tolist()
        if slope > 0:
            tau = kendall_tau(scores, _predicted_from_others(design[:, :columns], scores))
            return Surrogate(
                intercept=intercept, slope=slope, per_block=rest[0] if rest else 0.0, tau=tau, plans=tuple(plans),
                network=network, fingerprint=fingerprint, provenance=provenance,
            )  # fmt: skip
    raise InvalidValue(
        f"The importances do not predict the scores of the {len(plans)} trained plans: plans with a higher importance "
        "have lower scores. Train the plans for longer, or measure the importances with another method."
    )


def kendall_tau(one: Floats, two: Floats) -> float:
    """Return Kendall's tau-b of two sequences: 1 for the same order, -1 for the reverse, 0 if one is constant."""
    pairs = [(np.sign(one[i] - one[j]), np.sign(two[i] - two[j])) for i, j in combinations(range(len(one)), 2)]
    first, second = (np.array(column) for column in zip(*pairs, strict=True))
    untied = float(np.sqrt(np.sum(first != 0) * np.sum(second != 0)))
    return float(np.sum(first * second)) / untied if untied else 0.0


def _fit(design: Floats, scores: Floats) -> Floats:
    return np.asarray(np.linalg.lstsq(design, scores, rcond=None)[0], dtype=np.float64)


def _predicted_from_others(design: Floats, scores: Floats) -> Floats:
    """Return a prediction for each plan, by a fit to all others."""
    others = ~np.eye(len(scores), dtype=bool)
    return np.array([design[n] @ _fit(design[keep], scores[keep]) for n, keep in enumerate(others)])
