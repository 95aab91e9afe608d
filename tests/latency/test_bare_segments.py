"""A runtime on which an activation costs time, and plans that leave activations out."""

import copy
from dataclasses import dataclass, replace
from random import Random
from typing import ClassVar

import numpy as np
import pytest
import torch
from scipy.optimize import lsq_linear
from torch import nn

import depthfold as df
from depthfold.backends.cost_model import CostModel
from depthfold.core import Calibration, ConvShape, LatencyTable, Plan, Score, Span
from depthfold.core.calibration import LEAST
from depthfold.errors import InvalidValue
from depthfold.latency import measure_latency
from depthfold.latency.blocks import BlockShape, bare_segments, block_is_active, block_shape
from depthfold.latency.calibration import TRUST, Whole, fit
from depthfold.latency.candidates import network_inputs, shallow_of
from depthfold.latency.notebook import Notebook
from depthfold.latency.samples import fast_plans, plans_of_all_depths
from latency_workshop import COST, QUICK, plans, predicted

PER_ELEMENT = 4e-9  # seconds: about as much as this network's convolutions take for each number that they write


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfused(CostModel):
    """Every activation is a pass of its own over its map."""

    name: ClassVar[str] = "unfused"

    def compile(self, module, inputs):
        counted = 0

        def count(_module, _inputs, out):
            nonlocal counted
            counted += out.numel()

        run = copy.deepcopy(module)
        for part in run.modules():
            if isinstance(part, nn.ReLU6):
                part.register_forward_hook(count)
        with torch.inference_mode():
            run(*inputs)
        compiled = CostModel.compile(self, module, inputs)
        compiled._seconds += PER_ELEMENT * counted
        return compiled


UNFUSED = Unfused()


def milliseconds(network, plan):
    return 1e3 * UNFUSED.compile(shallow_of(network, plan), network_inputs(network)).seconds()


@pytest.fixture(scope="module")
def table(network):
    return measure_latency(network, UNFUSED, timer=QUICK)


def without_activations(network):
    """Random plans that the calibration has not seen: with all of the activations that blocks have, with some of
    them, and with none."""
    for n, plan in enumerate(plans_of_all_depths(network, network.spans("paper"), 12, seed=5)):
        full = Plan([span.j for span in network.segments(plan) if block_is_active(network, span)], plan.cuts)
        rng = Random(n)
        yield full
        yield Plan([position for position in sorted(full.activations) if rng.random() < 0.5], plan.cuts)
        yield Plan((), plan.cuts)


def test_plans_that_leave_activations_out_are_predicted(network, table):
    left_out = 0
    for plan in without_activations(network):
        wanted = milliseconds(network, plan)
        assert predicted(table, network, plan) == pytest.approx(wanted, rel=0.01)
        if (with_all := sum(table.times[span] for span in network.segments(plan))) > 1.05 * wanted:
            left_out += 1
        assert with_all > 0.99 * wanted
    assert left_out >= 12  # what was predicted of these before was too slow by more than 5 %
    assert table.calibration.per_activation == pytest.approx(PER_ELEMENT * 1e9, rel=0.05)
    assert table.calibration.worst_error < 0.01


def test_bare_times_are_of_active_blocks_only(network, table):
    per_million = table.calibration.per_activation
    for entry in table.entries:
        block = block_shape(network, entry.span, batch=1)
        if block_is_active(network, entry.span):
            assert entry.time - entry.bare == pytest.approx(per_million * block.elements[1] / 1e6)
            assert entry.bare >= LEAST * min(entry.samples)
        else:
            assert entry.bare is None
    assert {entry.bare is None for entry in table.entries} == {True, False}
    assert table.original == pytest.approx(milliseconds(network, network.vanilla), rel=0.01)
    assert table.predict(network, network.vanilla) == table.original
    assert LatencyTable.loads(table.dumps()) == table


def test_the_frontier_meets_the_stopwatch(network, table):
    """Every plan takes what the frontier says. Here inserted activations do harm, so that several are left out."""
    found = {}
    for seed in range(4):
        rng = Random(seed)
        scores = tuple(
            Score(span=span, samples=(rng.uniform(-0.1, 0.0) * len(span.span) ** 2 - 0.2 * span.b,))
            for span in network.flagged_spans()
        )
        found |= {plan.plan: plan for plan in df.solve(table, df.ImportanceTable(entries=scores), network=network)}
    bare = 0
    for plan in found.values():
        assert plan.latency == table.predict(network, plan)
        inserted = plan.activations - network.activations - {s.span.j for s in plan.segments if len(s.span) > 1}
        if not inserted:  # a single layer without an activation of its own has no second time
            assert plan.latency == pytest.approx(milliseconds(network, plan), rel=0.01)
            bare += bool(bare_segments(network, plan))
    assert bare > 5


def test_blocks_alone_have_one_time(network):
    alone = measure_latency(network, UNFUSED, mode="alone", timer=QUICK)
    assert alone.calibration is None
    assert {entry.bare for entry in alone.entries} == {None}


def test_where_activations_are_free_leaving_them_out_saves_nothing(network):
    table = measure_latency(network, COST, timer=QUICK)
    assert table.calibration.per_activation < 0.01 * PER_ELEMENT * 1e9
    for span, time in table.bare_times.items():
        assert time == pytest.approx(table.times[span], rel=5e-3)


def test_which_random_plans_leave_activations_out(network):
    spans = network.spans("paper")
    found = list(plans_of_all_depths(network, spans, 14))
    assert found == list(plans_of_all_depths(network, spans, 14))  # or a resumed run would measure others
    assert found[0] == network.vanilla
    leaving = [n for n, plan in enumerate(found) if bare_segments(network, plan)]
    assert len(leaving) >= 5 and all(n > 0 and n % 2 == 0 for n in leaving)  # where few stand, all may stay
    for plan in found:
        active = {span.j for span in network.segments(plan) if block_is_active(network, span)}
        assert plan.activations <= active
    kept = sum(len(plan.activations) for plan in found[2::2])
    whole = kept + sum(len(bare_segments(network, plan)) for plan in found[2::2])
    assert 0.3 < kept / whole < 0.7
    few = list(plans_of_all_depths(network, spans, 5))
    assert len(few) == 5 and not any(bare_segments(network, plan) for plan in few)
    fast = fast_plans(network, dict.fromkeys(spans, 1.0), 5)
    assert not any(bare_segments(network, plan) for plan in fast)


def block(channels, out, size, activation="relu"):
    shape = ConvShape(
        in_channels=channels, out_channels=out, kernel=(1, 1), stride=(1, 1), padding=((0, 0), (0, 0)), dilation=(1, 1)
    )
    return BlockShape(shape, (size, size), (), activation, 3)


def made_up(per_activation, outside=4.0, count=60):
    """Whole networks whose latencies follow the formula exactly."""
    rng = Random(0)
    spans = [Span(i, i + 1) for i in range(30)]
    blocks = {span: block(rng.randint(1, 400), rng.randint(1, 400), rng.randint(10, 100)) for span in spans}
    times = {span: rng.uniform(1.0, 5.0) for span in spans}
    wholes = []
    for n in range(count):
        segments = tuple(rng.sample(spans, rng.randint(3, 25)))
        bare = tuple(span for span in segments if n % 2 and rng.random() < 0.5)
        left_out = sum(blocks[span].elements[1] for span in bare) / 1e6
        latency = 0.9 * sum(times[span] for span in segments) + outside - per_activation * left_out
        wholes.append(Whole(segments, latency, bare))
    return wholes, blocks, times


@pytest.mark.parametrize("cost", [0.0, 0.01, 0.3])
def test_the_fit_finds_what_activations_cost(cost):
    wholes, blocks, times = made_up(cost)
    found = fit(wholes, blocks, times)
    assert found.per_activation == pytest.approx(cost, rel=0.02, abs=1e-3)
    assert (found.slope, found.outside) == (pytest.approx(0.9, rel=0.01), pytest.approx(4.0, rel=0.05))
    assert found.worst_error < 0.01


def test_no_activation_costs_less_than_nothing():
    """Networks that are slower without their activations, and nothing outside: both costs are at their limits, and the
    errors are those of a fit that knows nothing of activations."""
    wholes, blocks, times = made_up(-0.3, outside=-1.0)
    found = fit(wholes, blocks, times)
    assert (found.per_activation, found.outside) == (0.0, 0.0)
    before = fit([replace(whole, bare=()) for whole in wholes], blocks, times)
    assert found == before


@pytest.mark.parametrize(("cost", "outside"), [(-0.3, 4.0), (0.3, -1.0), (-0.05, -0.2), (0.05, 0.1), (0.02, -1.0)])
def test_the_fit_within_its_limits_is_the_best_one(cost, outside):
    """Against the non-negative least squares of SciPy, with the leaning as further rows."""
    wholes, blocks, times = made_up(cost, outside, count=9)
    sums = [[(times[span], 1.0, *blocks[span].elements) for span in whole.segments] for whole in wholes]
    left_out = np.array([sum(blocks[span].elements[1] for span in whole.bare) for whole in wholes])
    rows = np.column_stack([np.array([np.sum(each, axis=0) for each in sums]), np.ones(9), -left_out])
    rows *= [1, 1, 1e-6, 1e-6, 1, 1e-6]
    latencies = np.array([whole.latency for whole in wholes])
    lean = TRUST**0.5 * abs(rows).mean(axis=0) / latencies.mean()
    matrix = np.vstack([rows / latencies[:, None], np.diag(lean)])
    wanted = np.concatenate([np.ones(9), lean * [1, 0, 0, 0, 0, 0]])
    best = lsq_linear(matrix, wanted, ([-np.inf] * 4 + [0.0, 0.0], np.inf), method="bvls", tol=1e-14).x
    found = fit(wholes, blocks, times)
    costs = (found.slope, found.per_segment, found.per_read, found.per_write, found.outside, found.per_activation)
    assert costs == pytest.approx(tuple(best), rel=1e-6, abs=1e-9)


def calibrated(**changes):
    fields = {
        "slope": 0.5, "per_segment": 1.0, "per_read": 10.0, "per_write": 100.0, "outside": 0.0, "networks": 2,
        "median_error": 0.0, "worst_error": 0.0,
    }  # fmt: skip
    return Calibration(**fields | changes)


def test_a_block_without_its_activation_by_hand():
    found = calibrated(per_activation=7.0)
    assert found.in_context(4.0, 2e6, 3e6) == pytest.approx(0.5 * 4 + 1 + 10 * 2 + 100 * 3)
    assert found.in_context(4.0, 2e6, 3e6, 3e6) == pytest.approx(0.5 * 4 + 1 + 10 * 2 + 100 * 3 - 7 * 3)
    assert found.in_context(4.0, 2e6, 3e6, 3e9) == LEAST * 4  # no block is free, whatever it lacks


@pytest.mark.parametrize("cost", [-1e-9, float("nan"), float("inf")])
def test_a_calibration_refuses_a_cost_that_is_none(cost):
    with pytest.raises(InvalidValue, match="milliseconds per million numbers, 0 or more; found per_activation="):
        calibrated(per_activation=cost)


def test_a_calibration_of_before_still_loads(table):
    data = table.to_json()
    del data["calibration"]["per_activation"]
    for entry in data["entries"]:
        del entry["bare"]
    before = LatencyTable.from_json(data)
    assert before.calibration.per_activation == 0.0
    assert before.bare_times == before.times == table.times


def test_what_choosing_measured_counts_as_it_is(network, tmp_path):
    """A plan that leaves activations out, timed by choose(): its latency does not make other plans look cheap."""
    journal = tmp_path / "latency.jsonl"
    before = measure_latency(network, UNFUSED, timer=QUICK, networks=8, journal=journal)
    with Notebook.open(journal, network, UNFUSED.environment(network_inputs(network))) as notebook:
        for plan in plans(network, 6):
            bare = Plan((), plan.cuts)
            notebook.keep_share(bare, milliseconds(network, bare) / milliseconds(network, network.vanilla))
    after = measure_latency(network, UNFUSED, timer=QUICK, networks=8, journal=journal)
    assert after.calibration.networks > before.calibration.networks
    for plan in without_activations(network):
        assert predicted(after, network, plan) == pytest.approx(milliseconds(network, plan), rel=0.01)
