"""A runtime on which activations cost time, and plans that leave out or insert activations."""

from random import Random

import pytest
import torch
from torch import nn

import depthfold as df
from depthfold.backends.cost_model import CostModel
from depthfold.core import LatencyTable, Plan, Score
from depthfold.core.calibration import LEAST
from depthfold.latency import measure_latency
from depthfold.latency.blocks import timed_with_activation
from depthfold.latency.journal import LatencyJournal
from depthfold.latency.samples import nearly_fastest_plans, plans_of_all_depths
from latency_workshop import COST, QUICK, Small, Unfused, block_shape, plans
from latency_workshop import milliseconds as milliseconds_on

PER_ELEMENT = 4e-9  # seconds: about as much as this network's convolutions take per element that they write


UNFUSED = Unfused(costs=((nn.ReLU6, PER_ELEMENT),))


def milliseconds(traced, plan):
    return milliseconds_on(traced, plan, UNFUSED)


@pytest.fixture(scope="module")
def table(traced):
    return measure_latency(traced, UNFUSED, timer=QUICK)


def changed_segments(network, plan):
    """Return the segments of a plan whose activation at the end differs from that of their blocks."""
    active = network.final_activations(plan)
    return tuple(span for span in network.segments(plan) if (span.j in active) != timed_with_activation(network, span))


def as_timed(network, table):
    """Return the time of every block with the activation that it was timed with."""
    return {span: times[timed_with_activation(network, span)] for span, times in table.times.items()}


def without_activations(traced):
    """Yield random plans that the calibration has not seen: with all activations of their blocks, some or none."""
    for n, plan in enumerate(plans_of_all_depths(traced.network, traced.spans("paper"), 12, seed=5)):
        full = Plan(
            [span.j for span in traced.network.segments(plan) if timed_with_activation(traced.network, span)], plan.cuts
        )
        rng = Random(n)
        yield full
        yield Plan([position for position in sorted(full.activations) if rng.random() < 0.5], plan.cuts)
        yield Plan((), plan.cuts)


def test_plans_that_leave_out_activations_are_predicted(traced, table):
    left_out = 0
    for plan in without_activations(traced):
        wanted = milliseconds(traced, plan)
        assert table.predict(traced.network, plan) == pytest.approx(wanted, rel=0.01)
        as_measured = as_timed(traced.network, table)
        if (with_all := sum(as_measured[span] for span in traced.network.segments(plan))) > 1.05 * wanted:
            left_out += 1
        assert with_all > 0.99 * wanted
    assert left_out >= 12  # a table with one time per block is more than 5 % too slow for these
    assert table.calibration.per_activation == pytest.approx(PER_ELEMENT * 1e9, rel=0.05)
    assert table.calibration.worst_error < 0.01


def test_entries_differ_by_their_activation(traced, table):
    per_million = table.calibration.per_activation
    for entry in table.entries:
        activation = per_million * block_shape(traced, entry.span).elements[1] / 1e6
        without, with_one = entry.times
        assert with_one - without == pytest.approx(activation)
        assert without >= LEAST * entry.quartiles[0]
        inside = table.calibration.in_context(entry.quartiles[1], *block_shape(traced, entry.span).elements)
        inside += table.calibration.outside if entry.span.i == 0 else 0.0
        assert entry.times[timed_with_activation(traced.network, entry.span)] == pytest.approx(inside)
    assert {timed_with_activation(traced.network, entry.span) for entry in table.entries} == {True, False}
    assert table.original == pytest.approx(milliseconds(traced, traced.vanilla), rel=0.01)
    assert table.predict(traced.network, traced.vanilla) == table.original
    assert LatencyTable.loads(table.dumps()) == table


@pytest.mark.slow
def test_frontier_latencies_match_measured_ones(traced, table):
    """Importances that reward removed activations, and importances that reward inserted ones."""
    found = {}
    for seed in range(4):
        rng = Random(seed)
        scores = tuple(
            Score(span=span, samples=(rng.uniform(-0.1, 0.0) * len(span.span) ** 2 + (0.2, -0.2)[seed % 2] * span.b,))
            for span in traced.flagged_spans()
        )
        found |= {
            solved.plan: solved
            for solved in df.solve(table, df.ImportanceTable(entries=scores), network=traced.network)
        }
    left_out = inserted = 0
    for plan, solved in found.items():
        assert solved.latency == table.predict(traced.network, solved) == table.predict(traced.network, plan)
        assert solved.latency == pytest.approx(milliseconds(traced, plan), rel=0.01)
        changed = changed_segments(traced.network, plan)
        left_out += any(timed_with_activation(traced.network, span) for span in changed)
        inserted += not all(timed_with_activation(traced.network, span) for span in changed)
    assert left_out > 5 and inserted > 5


def test_activation_inserted_after_a_single_layer_is_predicted(traced, table):
    """A table with one time per block would take it for free."""
    inserted = Plan(range(1, traced.depth + 1), range(1, traced.depth))
    assert len(changed_segments(traced.network, inserted)) == traced.depth - len(traced.network.activations) > 3
    assert table.predict(traced.network, inserted) == pytest.approx(milliseconds(traced, inserted), rel=0.01)
    assert table.predict(traced.network, inserted) > 1.02 * table.original


def test_activation_at_the_output_is_always_counted():
    """A plan need not contain it, but rewriting keeps it."""
    torch.manual_seed(0)
    layers = [part for _ in range(6) for part in (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU6())]
    traced = df.trace(nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU6(), *layers), torch.randn(1, 3, 32, 32))
    table = measure_latency(traced, UNFUSED, timer=QUICK)
    assert table.calibration.per_activation == pytest.approx(PER_ELEMENT * 1e9, rel=0.05)
    for cuts in (range(1, 7), (2, 4), ()):
        unnamed, named = Plan((), cuts), Plan({traced.depth}, cuts)
        assert changed_segments(traced.network, unnamed) == changed_segments(traced.network, named)
        wanted = milliseconds(traced, unnamed)
        assert wanted == milliseconds(traced, named)
        assert (
            table.predict(traced.network, unnamed)
            == table.predict(traced.network, named)
            == pytest.approx(wanted, rel=0.01)
        )


def test_nearly_fastest_networks_also_leave_out_activations(traced, tmp_path):
    measure_latency(traced, CostModel(gflops=0.2), timer=QUICK, networks=20, run=tmp_path)
    spans = traced.spans("paper")
    with LatencyJournal(tmp_path, traced, CostModel(gflops=0.2).environment(traced.example_tensors())) as journal:
        random = {plan.cuts for plan in plans_of_all_depths(traced.network, spans, 14, drop_activations=True)}
        fast = [plan for plan in journal.plans.values() if plan.cuts not in random]
    assert len(fast) > 3
    assert {bool(changed_segments(traced.network, plan)) for plan in fast} == {True, False}


def test_cost_of_activations_needs_seven_networks():
    """It needs as many random plans as there are costs: five. Six networks have only four."""
    torch.manual_seed(0)
    traced = df.trace(Small(), torch.randn(1, 3, 32, 32), ignore=["stem"])
    enough = measure_latency(traced, UNFUSED, timer=QUICK, networks=7)
    assert enough.calibration.per_activation == pytest.approx(PER_ELEMENT * 1e9, rel=0.2)
    fewer = measure_latency(traced, UNFUSED, timer=QUICK, networks=6)
    assert fewer.calibration.per_activation is None
    assert all(without == with_one for without, with_one in fewer.times.values())


def test_both_times_of_a_block_alone_are_equal(traced):
    alone = measure_latency(traced, UNFUSED, mode="alone", timer=QUICK)
    assert alone.calibration is None
    assert all(without == with_one for without, with_one in alone.times.values())


def test_free_activations_save_nothing(traced):
    table = measure_latency(traced, COST, timer=QUICK)
    assert table.calibration.per_activation < 0.01 * PER_ELEMENT * 1e9
    for without, with_one in table.times.values():
        assert without == pytest.approx(with_one, rel=5e-3)


def test_plans_leave_out_any_share_of_their_activations(traced):
    spans = traced.spans("paper")
    whole = list(plans_of_all_depths(traced.network, spans, 14))
    thin = list(plans_of_all_depths(traced.network, spans, 14, drop_activations=True))
    assert thin == list(
        plans_of_all_depths(traced.network, spans, 14, drop_activations=True)
    )  # otherwise a resumed run would measure other plans
    assert thin[0] == whole[0] == traced.vanilla
    assert [plan.cuts for plan in thin] == [plan.cuts for plan in whole]
    assert not any(changed_segments(traced.network, plan) for plan in whole)
    shares = [len(one.activations) / len(all_.activations) for one, all_ in zip(thin[1:], whole[1:], strict=True)]
    assert min(shares) < 0.25 and max(shares) > 0.75 and len(set(shares)) > 4
    assert all(one.activations <= all_.activations for one, all_ in zip(thin, whole, strict=True))
    times = {span: float(len(span)) for span in spans}  # all plans are equally fast, except for the jitter
    fast, thin = (
        list(nearly_fastest_plans(traced.network, times, 10)),
        list(nearly_fastest_plans(traced.network, times, 10, drop_activations=True)),
    )
    assert thin[::2] == fast[::2]  # including the fastest
    assert any(one.activations < all_.activations for one, all_ in zip(thin[1::2], fast[1::2], strict=True))


@pytest.mark.slow
def test_shares_measured_by_choose_count_with_their_activations(traced, tmp_path):
    """A plan without activations that choose() timed does not make other plans look faster."""
    before = measure_latency(traced, UNFUSED, timer=QUICK, networks=8, run=tmp_path)
    with LatencyJournal(tmp_path, traced, UNFUSED.environment(traced.example_tensors())) as journal:
        for plan in plans(traced, 6):
            bare = Plan((), plan.cuts)
            journal.add_share(bare, milliseconds(traced, bare) / milliseconds(traced, traced.vanilla))
    after = measure_latency(traced, UNFUSED, timer=QUICK, networks=8, run=tmp_path)
    assert after.calibration.networks > before.calibration.networks
    for plan in without_activations(traced):
        assert after.predict(traced.network, plan) == pytest.approx(milliseconds(traced, plan), rel=0.01)
