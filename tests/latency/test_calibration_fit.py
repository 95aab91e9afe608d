"""Fit a calibration to networks that follow its formula, with and without noise."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from scipy.optimize import lsq_linear

from depthfold.core import Calibration, ConvShape, Span
from depthfold.core.calibration import LEAST
from depthfold.errors import InvalidValue
from depthfold.latency.blocks import BlockShape
from depthfold.latency.calibration import MAX_KINDS, PRIOR_WEIGHT, Samples, TimedNetwork, fit


def block(channels, out, size, activation="relu"):
    shape = ConvShape(
        in_channels=channels, out_channels=out, kernel=(1, 1), stride=(1, 1), padding=((0, 0), (0, 0)), dilation=(1, 1)
    )
    return BlockShape(shape, (size, size), (), activation, 3)


def made_up(per_activation, outside=4.0, count=60, noise=0.0, seed=0, per_kind=()):
    """Return networks whose latencies follow the formula, with noise. `per_kind` are the costs of the activations at
    the first positions, if they differ."""
    rng = Random(seed)
    spans = [Span(i, i + 1) for i in range(30)]
    blocks = {
        span: block(rng.randint(1, 400), rng.randint(1, 400), rng.randint(10, 100), rng.choice(("relu", None)))
        for span in spans
    }
    times = {span: rng.uniform(1.0, 5.0) for span in spans}
    wholes = []
    for n in range(count):
        segments = tuple(rng.sample(spans, rng.randint(3, 25)))
        changed = tuple(span for span in segments if n % 2 and rng.random() < 0.5)
        cost = dict(zip(spans, per_kind, strict=False))
        others = sum(
            cost.get(span, per_activation) * blocks[span].elements[1] * (-1 if blocks[span].activation else 1)
            for span in changed
        )
        latency = 0.9 * sum(times[span] for span in segments) + outside + others / 1e6
        active = frozenset(s.j for s in segments if (blocks[s].activation is None) == (s in changed))
        wholes.append(TimedNetwork(segments, latency * rng.gauss(1.0, noise), active))
    return wholes, blocks, times


ONE_KIND = ("relu",) * 30  # at all positions


def unchanged(whole, blocks):
    """Return the network with the activations that its blocks were timed with."""
    active = frozenset(s.j for s in whole.segments if blocks[s].activation is not None)
    return replace(whole, activations=active)


@pytest.mark.parametrize("cost", [0.0, 0.01, 0.05])
def test_fit_finds_the_cost_of_activations(cost):
    wholes, blocks, times = made_up(cost)
    found = fit(Samples(wholes, blocks, times, ONE_KIND))
    assert found.per_activation == pytest.approx(cost, rel=0.02, abs=1e-3)
    assert (found.slope, found.outside) == (pytest.approx(0.9, rel=0.01), pytest.approx(4.0, rel=0.05))
    assert found.worst_error < 0.01


def test_cost_of_activations_is_never_negative():
    """Networks that are slower without their activations, and nothing outside: both costs are at their limits, and the
    errors are those of a fit that knows nothing of activations."""
    wholes, blocks, times = made_up(-0.3, outside=-1.0)
    found = fit(Samples(wholes, blocks, times, ONE_KIND))
    assert (found.per_activation, found.outside) == (0.0, 0.0)
    before = fit(Samples([unchanged(whole, blocks) for whole in wholes], blocks, times, ONE_KIND))
    assert found == replace(before, per_activation=0.0)


def costs(found):
    assert found.per_read == found.per_write
    return (found.slope, found.per_segment, found.per_read, found.outside, found.per_activation or 0.0)


def changed_segments(whole, blocks):
    """Return the segments whose activation at the end differs from that of their blocks."""
    return [s for s in whole.segments if (s.j in whole.activations) == (blocks[s].activation is None)]


def best_of(wholes, blocks, times, activations, kinds=("all",) * 30, names=("all",)):
    """Solve with SciPy's bounded least squares, with the prior as further rows: one cost for each of the names."""
    sums = [[(times[span], 1.0, sum(blocks[span].elements)) for span in whole.segments] for whole in wholes]
    sizes = {span: (1 if block.activation is None else -1) * block.elements[1] for span, block in blocks.items()}
    others = [
        [sum(sizes[span] for span in changed_segments(whole, blocks) if kinds[span.j - 1] == name) for whole in wholes]
        for name in names
    ]
    rows = np.column_stack([np.array([np.sum(each, axis=0) for each in sums]), np.ones(len(wholes)), *others])
    rows *= [1, 1, 1e-6, 1, *[1e-6] * len(names)]
    latencies = np.array([whole.latency for whole in wholes])
    lean = PRIOR_WEIGHT**0.5 * np.maximum(abs(rows).mean(axis=0), 1e-12) / latencies.mean()
    matrix = np.vstack([rows / latencies[:, None], np.diag(lean)])
    wanted = np.concatenate([np.ones(len(wholes)), lean * [1, *[0] * (rows.shape[1] - 1)]])
    limits = [0.0, -np.inf, -np.inf, 0.0, *[0.0] * len(names)]
    used = len(limits) if activations else 4
    found = lsq_linear(matrix[:, :used], wanted, (limits[:used], np.inf), method="bvls", tol=1e-14).x
    return (*found, 0.0)[: max(used, 5)]


@pytest.mark.parametrize(("cost", "outside"), [(-0.3, 4.0), (0.3, -1.0), (-0.05, -0.2), (0.05, 0.1), (0.02, -1.0)])
def test_fit_is_the_optimum_within_the_bounds(cost, outside):
    wholes, blocks, times = made_up(cost, outside, count=9)
    found = fit(Samples(wholes, blocks, times, ONE_KIND))  # with a cost of activations only if this predicts better
    best = best_of(wholes, blocks, times, activations=bool(found.per_activation))
    assert costs(found) == pytest.approx(best, rel=1e-6, abs=1e-9)


MIXED = ("mish", "hardswish") * 15  # the kinds of 30 positions


@pytest.mark.parametrize(("mish", "hardswish"), [(0.3, 0.02), (0.02, 0.3), (0.3, 0.0), (0.3, -0.1), (0.0, 0.0)])
@pytest.mark.parametrize("count", [9, 60])
def test_each_kind_of_activations_has_its_cost(mish, hardswish, count):
    wholes, blocks, times = made_up(0.0, count=count, per_kind=(mish, hardswish) * 15)
    found = fit(Samples(wholes, blocks, times, MIXED))
    own = [name for name, _ in found.per_kind]
    names = (*({"mish", "hardswish"} - set(own)), *own)
    of_kind = [found.of_kind(name).per_activation for name in names]
    if own:
        best = best_of(wholes, blocks, times, True, MIXED, names)
        assert (*costs(found)[:4], *of_kind) == pytest.approx(best, rel=1e-6, abs=1e-9)
    if count == 60:
        wanted = [{"mish": mish, "hardswish": max(hardswish, 0.0)}[name] for name in names]
        assert of_kind == pytest.approx(wanted, rel=0.1, abs=0.02 if hardswish < 0 else 5e-3)
        assert bool(own) == (mish != hardswish)


@pytest.mark.parametrize(("noise", "limit"), [(0.0, 1e-3), (0.02, 0.1)])
def test_kinds_of_one_cost_are_not_told_apart(noise, limit):
    apart = []
    for seed in range(10):
        wholes, blocks, times = made_up(0.3, count=20, noise=noise, seed=seed)
        found = fit(Samples(wholes, blocks, times, MIXED))
        apart.append(abs(found.of_kind("mish").per_activation - found.of_kind("hardswish").per_activation))
    assert sorted(apart)[5] < limit


def test_kinds_that_few_networks_leave_out_share_a_cost():
    """Thirty kinds: only as many have their own cost as the networks determine."""
    kinds = tuple(f"kind {n}" for n in range(30))
    wholes, blocks, times = made_up(0.0, count=60, per_kind=tuple(0.01 * n for n in range(30)))
    assert len(fit(Samples(wholes, blocks, times, kinds)).per_kind) in range(MAX_KINDS)
    rare = tuple("rare" if n == 3 else "frequent" for n in range(30))
    wholes, blocks, times = made_up(0.02, count=60, per_kind=(0.02, 0.02, 0.02, 0.5))
    changed = [whole for whole in wholes if any(span.j == 4 for span in changed_segments(whole, blocks))]
    assert fit(Samples(wholes, blocks, times, rare)).per_kind
    few = [whole for whole in wholes if whole not in changed[2:]]
    assert fit(Samples(few, blocks, times, rare)).per_kind == ()  # two networks differ in it


def test_kinds_share_a_cost_if_there_are_fewer_networks_than_costs():
    wholes, blocks, times = made_up(0.0, count=12, per_kind=(0.3, 0.02) * 15)
    assert all(fit(Samples(wholes[:n], blocks, times, MIXED)).per_kind == () for n in range(2, 7))
    assert fit(Samples(wholes, blocks, times, MIXED)).per_kind


@pytest.mark.parametrize("count", [2, 3, 4, 6])
def test_fit_to_few_networks_stays_near_the_prior(count):
    """Blocks that pay launches of 2 ms alone, and none inside: few networks say little but how many segments they have,
    and yet the slope must not fall to 0."""
    falls = 0
    for seed in range(20):
        rng = Random(seed)
        wholes, blocks, times = made_up(0.0, count=count, seed=seed)
        launches = {span: time + 2.0 for span, time in times.items()}
        noisy = [replace(unchanged(whole, blocks), latency=whole.latency * rng.gauss(1.0, 0.01)) for whole in wholes]
        found = fit(Samples(noisy, blocks, launches, ONE_KIND))
        assert costs(found) == pytest.approx(best_of(noisy, blocks, launches, activations=False), rel=1e-5, abs=1e-8)
        falls += found.slope == 0.0
    assert falls < 5


def test_slope_is_never_negative():
    """Networks that are faster with slower blocks: without its bound, the slope would be negative."""
    wholes, blocks, times = made_up(0.0, count=12)
    upside_down = [
        replace(
            unchanged(whole, blocks),
            latency=8.0 * len(whole.segments) - sum(times[span] for span in whole.segments),
        )
        for whole in wholes
    ]
    found = fit(Samples(upside_down, blocks, times, ONE_KIND))
    assert found.slope == 0.0
    assert costs(found) == pytest.approx(best_of(upside_down, blocks, times, activations=False), rel=1e-5, abs=1e-8)


def calibrated(**changes):
    fields = {
        "slope": 0.5, "per_segment": 1.0, "per_read": 10.0, "per_write": 100.0, "outside": 0.0, "networks": 2,
        "median_error": 0.0, "worst_error": 0.0,
    }  # fmt: skip
    return Calibration(**fields | changes)


def test_noise_is_not_fitted_as_a_cost_of_activations():
    """A runtime that fuses activations, with noise of 2 %."""
    saved = []
    for seed in range(20):
        wholes, blocks, times = made_up(0.0, count=14, noise=0.02, seed=seed)
        found = fit(Samples(wholes, blocks, times, ONE_KIND))
        size = max(sum(blocks[span].elements[1] for span in whole.segments) for whole in wholes) / 1e6
        saved.append(found.per_activation * size / max(whole.latency for whole in wholes))
    assert sum(share == 0.0 for share in saved) >= 12
    assert sum(saved) / len(saved) < 0.03


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_two_networks_do_not_determine_the_cost_of_activations(noise):
    wholes, blocks, times = made_up(0.3, count=9, noise=noise)
    few = [whole for n, whole in enumerate(wholes) if n % 2 == 0 or n < 4]
    assert sum(bool(changed_segments(whole, blocks)) for whole in few) == 2
    three = [whole for n, whole in enumerate(wholes) if n % 2 == 0 or n < 6]
    assert fit(Samples(three, blocks, times, ONE_KIND)).per_activation is not None
    found = fit(Samples(few, blocks, times, ONE_KIND))
    assert found.per_activation is None
    assert found == fit(Samples([unchanged(whole, blocks) for whole in few], blocks, times, ONE_KIND))
    assert fit(Samples(wholes, blocks, times, ONE_KIND)).per_activation is not None


def test_in_context_with_another_activation_by_hand():
    found = calibrated(per_activation=7.0)
    assert found.in_context(4.0, 2e6, 3e6) == pytest.approx(0.5 * 4 + 1 + 10 * 2 + 100 * 3)
    assert found.in_context(4.0, 2e6, 3e6, -3e6) == pytest.approx(0.5 * 4 + 1 + 10 * 2 + 100 * 3 - 7 * 3)
    assert found.in_context(4.0, 2e6, 3e6, 3e6) == pytest.approx(0.5 * 4 + 1 + 10 * 2 + 100 * 3 + 7 * 3)
    assert found.in_context(4.0, 2e6, 3e6, -3e9) == LEAST * 4  # no block is free
    assert found.is_floored(4.0, 2e6, 3e6, -3e9) and not found.is_floored(4.0, 2e6, 3e6, -3e6)
    assert calibrated(per_activation=None).in_context(4.0, 2e6, 3e6, 3e6) == found.in_context(4.0, 2e6, 3e6)


@pytest.mark.parametrize("name", ["slope", "per_segment", "outside", "per_activation"])
@pytest.mark.parametrize("cost", [float("nan"), float("inf")])
def test_calibration_refuses_a_cost_that_is_not_a_number(name, cost):
    with pytest.raises(InvalidValue, match=f"The {name} of a calibration must be a number, found .*Measure again"):
        calibrated(**{name: cost})


def test_calibration_refuses_a_negative_cost_of_activations():
    with pytest.raises(InvalidValue, match=r"The per_activation .* must be 0 or more, found -1e-09"):
        calibrated(per_activation=-1e-9)
    assert calibrated(slope=-0.01).slope == -0.01  # a file may have it
