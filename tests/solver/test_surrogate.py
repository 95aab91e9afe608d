"""The fitted surrogate: its coefficients, Kendall's tau, and what solve() maximises with it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import kendalltau, linregress

from depthfold.core import FlaggedSpan, ImportanceTable, LatencyTable, Plan, Score, Span, Surrogate, Timing, TrainedPlan
from depthfold.errors import InvalidValue
from depthfold.solver import fit_to_plans, solve


def trained(importance: float, blocks: int, score: float) -> TrainedPlan:
    return TrainedPlan(plan=Plan(activations=(), cuts=()), importance=importance, blocks=blocks, score=score)


def test_fit_finds_the_coefficients_of_an_exact_model() -> None:
    plans = [trained(i, n, 90 + 0.5 * i + 0.1 * n) for i, n in ((-1, 20), (-4, 14), (-9, 12), (-2, 9), (-20, 5))]
    found = fit_to_plans(plans)
    assert np.allclose((found.intercept, found.slope, found.per_block), (90, 0.5, 0.1))
    assert found.tau == 1.0
    assert found.predict(-4, 14) == pytest.approx(89.4)


def by_least_squares(*columns: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    def fit(design: np.ndarray, scores: np.ndarray) -> np.ndarray:
        chosen = design[:, columns]
        found = np.zeros(3)
        found[list(columns)] = np.linalg.inv(chosen.T @ chosen) @ chosen.T @ scores
        return found

    return fit


def by_ranks(design: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Try the ratios between those at which two plans are equal, with both signs of the importance."""
    pairs = itertools.combinations(design[:, 1:], 2)
    ties = sorted((i - k) / (m - n) for (i, n), (k, m) in pairs if n != m)
    width = ties[-1] - ties[0]
    ratios = [ties[0] - width, *(sum(each) / 2 for each in itertools.pairwise(ties)), ties[-1] + width]
    taus = [kendalltau(design[:, 1] + ratio * design[:, 2], scores).statistic for ratio in ratios]
    sign = 1 if max(taus) >= -min(taus) else -1
    best = [ratio for ratio, tau in zip(ratios, taus, strict=True) if sign * tau > max(map(abs, taus)) - 1e-9]
    slope = linregress(design[:, 1] + best[len(best) // 2] * design[:, 2], scores).slope
    return np.array((0.0, slope, slope * best[len(best) // 2]))  # the intercept does not order plans


@pytest.mark.parametrize("seed", range(12))
def test_tau_orders_each_plan_among_the_others_by_a_fit_without_it(seed: int) -> None:
    generator = np.random.default_rng(seed)
    importances, blocks = generator.normal(size=9), generator.permutation(30)[:9].astype(float)
    index = 2 * importances + generator.normal(size=9) + seed % 2 * blocks / 5
    scores = index if seed % 3 else np.exp(index)
    design = np.column_stack((np.ones(9), importances, blocks))

    def tau(fit: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> float:
        agreeing = 0.0
        for n in range(9):
            rest = [m for m in range(9) if m != n]
            solution = fit(design[rest], scores[rest])
            agreeing += sum(np.sign((design[n] - design[m]) @ solution * (scores[n] - scores[m])) for m in rest)
        return agreeing / (9 * 8)

    found = fit_to_plans([trained(*row) for row in zip(importances, blocks.astype(int), scores, strict=True)])
    fits = by_least_squares(0, 1, 2), by_ranks, by_least_squares(0, 1)
    taus = [tau(fit) for fit in fits]
    assert found.tau == pytest.approx(max(taus))
    _, slope, per_block = fits[int(np.argmax(np.round(taus, 9)))](design, scores)  # the first if two are equal
    assert (found.slope, found.per_block) == (pytest.approx(slope), pytest.approx(per_block))


def test_scores_that_saturate_do_not_hide_what_a_block_is_worth() -> None:
    """The score is an increasing function of the importance and half the blocks, which is flat where all is lost."""
    generator = np.random.default_rng(5)
    importances, blocks = -(generator.random(24) ** 3) * 100, generator.integers(10, 50, 24)
    index = importances + 0.5 * blocks
    scores = 10 + 90 / (1 + np.exp(-index / 3))
    design = np.column_stack((np.ones(24), importances, blocks))
    _, slope, per_block = np.linalg.lstsq(design, scores, rcond=None)[0]
    assert per_block / slope > 1
    found = fit_to_plans([trained(*row) for row in zip(importances, blocks, scores, strict=True)])
    assert found.per_block / found.slope == pytest.approx(0.5, abs=0.1)
    assert found.tau > 0.9


# Importance, blocks and score of plans for EfficientNet-Lite0 that were trained for three epochs on Imagenette.
LITE0 = [
    (0.0, 47, 97.6),
    (0.4, 49, 96.1),
    (-3.9, 45, 96.0),
    (2.4, 40, 95.2),
    (-0.5, 30, 94.8),
    (1.5, 37, 94.5),
    (2.3, 40, 93.0),
    (-3.0, 28, 90.1),
    (-4.9, 41, 86.5),
    (-7.1, 22, 86.1),
    (-10.1, 22, 82.3),
    (-10.5, 38, 48.2),
    (-14.6, 21, 38.9),
    (-47.5, 16, 37.7),
    (-12.9, 33, 30.5),
    (-26.9, 23, 29.8),
    (-169.2, 10, 26.3),
    (-104.2, 16, 24.5),
    (-23.1, 20, 21.4),
    (-99.2, 10, 20.2),
    (-23.3, 28, 19.6),
    (-50.2, 18, 18.2),
    (-167.6, 8, 16.8),
    (-23.2, 33, 14.5),
]


def test_plans_that_lost_their_accuracy_do_not_decide_the_fit() -> None:
    """Plans of about the same latency: least squares with the blocks would prefer the one that fails."""
    fails, works = (-10.5, 38, 48.2), (-3.0, 28, 90.1)
    assert fails in LITE0 and works in LITE0
    design = np.array([(1.0, i, n) for i, n, _ in LITE0])
    _, slope, per_block = np.linalg.lstsq(design, np.array([score for *_, score in LITE0]), rcond=None)[0]
    assert slope * fails[0] + per_block * fails[1] > slope * works[0] + per_block * works[1]
    found = fit_to_plans([trained(*plan) for plan in LITE0])
    assert found.predict(*fails[:2]) < found.predict(*works[:2])


def test_negative_slope_is_not_used() -> None:
    # The number of blocks explains the scores exactly, and leaves a small negative slope for the importances.
    plans = [trained(i, n, 80 + n - 0.01 * i) for i, n in ((-10.0, 2), (-8.0, 4), (-5.5, 6), (-4.0, 8), (-1.0, 10))]
    found = fit_to_plans(plans)
    predictions = [found.predict(plan.importance, plan.blocks) for plan in plans]
    assert found.slope > 0 and predictions == sorted(predictions)


@pytest.mark.parametrize("unit", [0.001, 1000.0])
def test_fit_does_not_depend_on_the_unit_of_the_importances(unit: float) -> None:
    """Plans with more blocks and importance have higher scores: many ratios order them."""
    rows = [(-10.0, 2, 82), (-8.0, 4, 84.5), (-5.5, 6, 85), (-4.0, 8, 88), (-1.0, 10, 90), (0.0, 11, 90.2)]
    one, other = (fit_to_plans([trained(i * by, n, score) for i, n, score in rows]) for by in (1, unit))
    assert (other.slope * unit, other.per_block) == (pytest.approx(one.slope), pytest.approx(one.per_block))


def test_constant_number_of_blocks_has_no_coefficient() -> None:
    found = fit_to_plans([trained(-i, 14, 90 - 2 * i) for i in range(6)])
    assert (found.slope, found.per_block, found.tau) == (pytest.approx(2), 0, 1)


def test_rounding_of_importances_does_not_order_plans() -> None:
    """Without the blocks, the last two plans are tied, which is better than to order them wrongly."""
    plans = [trained(-i, 20 - (i * 7) % 5, 90 - i) for i in range(5)]
    for noise in (-1e-13, 0.0, 1e-13):
        found = fit_to_plans([*plans, trained(-6.0 + noise, 12, 85), trained(-6.0, 14, 84)])
        assert found.tau == fit_to_plans([*plans, trained(-6.0, 12, 85), trained(-6.0, 14, 84)]).tau


def test_rounding_of_importances_does_not_decide_what_a_block_is_worth() -> None:
    """Several pairs of these plans change places at the same ratio, up to rounding."""
    first, *rest = [(-2.9, 7, 69), (-0.2, 8, 89), (-1.6, 6, 84), (-1.3, 5, 85), (-2.3, 5, 61), (-1.0, 3, 78)]
    plans = [trained(*row) for row in rest]
    one, other = (fit_to_plans([trained(first[0] + noise, *first[1:]), *plans]) for noise in (0.0, 1e-13))
    assert (other.slope, other.per_block) == (pytest.approx(one.slope), pytest.approx(one.per_block))


def test_importances_that_mislead_are_refused() -> None:
    plans = [trained(-i, 5 + i % 2, 80 + i) for i in range(6)]
    wrong_sign = [trained(i, n, 60 + n - 3 * i) for i, n in enumerate((20, 9, 17, 5, 14, 8))]
    same_importance = [trained(0.0, n, 80 + n) for n in range(6)]
    same_score = [trained(-i, 5 + i % 3, 10.0) for i in range(6)]
    for misled in (plans, wrong_sign, same_importance, same_score):
        with pytest.raises(InvalidValue, match="do not predict the scores of the 6 trained plans"):
            fit_to_plans(misled)
    with pytest.raises(InvalidValue, match="at least 4 trained plans, found 3"):
        fit_to_plans(plans[:3])


def _tables(seed: int, depth: int = 6) -> tuple[LatencyTable, ImportanceTable]:
    generator = random.Random(seed)
    spans = [(i, j) for i, j in itertools.combinations(range(depth + 1), 2) if j - i <= 3]
    entries = [Timing(span=Span(i, j), times=(generator.random(),) * 2) for i, j in spans]
    scores = [
        Score(span=FlaggedSpan(i, j, True, True), samples=(-generator.random() * (j - i) ** 2,)) for i, j in spans
    ]
    return LatencyTable(entries=tuple(entries)), ImportanceTable(entries=tuple(scores))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("per_block", [-0.7, 0.0, 0.7])
def test_solve_maximises_the_predicted_score(seed: int, per_block: float) -> None:
    latency, importance = _tables(seed)
    surrogate = Surrogate(intercept=90, slope=0.3, per_block=per_block, tau=1, plans=())
    frontier = solve(latency, importance, surrogate=surrogate)
    times = {(t.span.i, t.span.j): t.times[0] for t in latency.entries if t.times}
    shortest = {  # over all ways to split a block into merged segments
        (i, j): min(
            sum(times.get(segment, np.inf) for segment in itertools.pairwise((i, *S, j)))
            for size in range(j - i)
            for S in itertools.combinations(range(i + 1, j), size)
        )
        for i, j in itertools.combinations(range(7), 2)
    }
    values = {(s.i, s.j): value for s, value in importance.importances.items()}
    best: dict[tuple[int, ...], tuple[float, float]] = {}
    for size in range(6):
        for B in itertools.combinations(range(1, 6), size):
            blocks = list(itertools.pairwise((0, *B, 6)))
            if all(block in values for block in blocks):
                total = surrogate.predict(sum(values[b] for b in blocks), len(blocks))
                best[B] = sum(shortest[b] for b in blocks), total
    for point in frontier.points:
        reachable = [score for time, score in best.values() if time <= point.latency + 1e-9]
        assert max(reachable) == pytest.approx(surrogate.intercept + point.importance)


def test_surrogate_and_alpha_exclude_each_other() -> None:
    latency, importance = _tables(0)
    surrogate = Surrogate(intercept=0, slope=1, per_block=0, tau=1, plans=())
    with pytest.raises(InvalidValue, match="takes the place of alpha"):
        solve(latency, importance, alpha=1.6, surrogate=surrogate)


def test_surrogate_of_another_network_is_refused() -> None:
    latency, importance = _tables(0)
    importance = ImportanceTable(entries=importance.entries, fingerprint="one")
    surrogate = Surrogate(intercept=0, slope=1, per_block=0, tau=1, plans=(), fingerprint="two")
    with pytest.raises(InvalidValue, match="another network"):
        solve(latency, importance, surrogate=surrogate)


def test_slope_must_be_positive() -> None:
    with pytest.raises(InvalidValue, match="slope of a surrogate must be more than 0"):
        Surrogate(intercept=0, slope=0, per_block=1, tau=1, plans=())
