"""The latency table on a runtime that computes its times: what must come out is known."""

import dataclasses
import json

import pytest
import torch
from torch import nn

import depthfold as df
from depthfold.backends.cost_model import CostModel
from depthfold.core import Span
from depthfold.errors import BackendError, BudgetError, InvalidValue, OutOfMemory, TableError
from depthfold.latency import choose, measure_latency, profile, profile_all, side_by_side
from depthfold.latency.blocks import block_module, block_shape, block_shapes
from depthfold.latency.candidates import shallow_of
from depthfold.latency.measure import DoubtfulTable, wholes
from depthfold.latency.notebook import Notebook
from depthfold.progress import progress_lines
from depthfold.store import Journal
from latency_workshop import COST, QUICK, milliseconds, plans


def test_alone_each_block_costs_what_the_cost_model_says(network):
    table = measure_latency(network, COST, mode="alone", timer=QUICK)
    assert set(table.times) == set(network.spans("paper"))
    assert table.calibration is None
    for span in (Span(0, 1), Span(0, 3), Span(1, 3), Span(6, 8), Span(11, 12)):
        block = block_shape(network, span, batch=1)
        assert table.times[span] == pytest.approx(
            COST.compile(block_module(network, block), block.inputs()).seconds() * 1000
        )


def test_in_context_the_sum_over_a_plan_predicts_the_whole_network(network):
    alone = measure_latency(network, COST, mode="alone", timer=QUICK)
    table = measure_latency(network, COST, timer=QUICK, networks=12)
    for plan in plans(network, 12):
        wanted = milliseconds(network, plan)
        assert table.predict(network, plan) == pytest.approx(wanted, rel=0.02)
        assert alone.predict(network, plan) > 1.2 * wanted  # every block pays for a network of its own
    assert table.calibration.worst_error < 0.02
    assert df.LatencyTable.loads(table.dumps()) == table


def test_blocks_hold_what_stays_of_an_addition(network):
    """A span inside a residual keeps its addition, and its projection: the block has them, too."""
    (projected,) = [skip for skip in network.skips if skip.projection]
    inside = block_shape(network, Span(projected.target - 1, projected.target), batch=1)
    whole = block_shape(network, projected.span, batch=1)
    assert len(inside.branches) == 1 and inside.branches[0].projection == projected.projection
    assert whole.branches == ()
    module = block_module(network, inside)
    assert module(*inside.inputs()).shape == (1, 12, *network.layers[projected.target - 1].out_size)


def test_equal_blocks_are_measured_once(network):
    compiled = []

    @dataclasses.dataclass(frozen=True, slots=True)
    class Counting(CostModel):
        def compile(self, module, inputs):
            compiled.append(module)
            return CostModel.compile(self, module, inputs)

    measure_latency(network, Counting(), mode="alone", timer=QUICK)
    shapes = set(block_shapes(network, network.spans("paper"), 1).values())
    assert len(compiled) == len(shapes) < len(network.spans("paper"))


class Killed(Exception):
    pass


def test_a_killed_measurement_goes_on_where_it_was(network, tmp_path):
    """Killed at every tenth turn: in the end nothing was measured twice, and the table is that of one run."""
    taken = 0

    def killer(what, total, done):
        def step():
            nonlocal taken
            if what.startswith("compiling"):
                return
            taken += 1
            if taken % 10 == 0:
                raise Killed

        return step

    journal = tmp_path / "latency.jsonl"
    for _ in range(200):
        try:
            table = measure_latency(network, COST, timer=QUICK, networks=6, journal=journal, progress=killer)
            break
        except Killed:
            continue
    whole = measure_latency(network, COST, timer=QUICK, networks=6)
    assert table == whole
    distinct = len(set(block_shapes(network, network.spans("paper"), 1).values()))
    timed = {json.loads(line)["key"] for line in journal.read_text().splitlines()[1:]}
    assert len(timed) > distinct + 3 and taken == QUICK.turns * len(timed)


def test_a_journal_of_another_environment_is_refused_and_both_are_shown(network, tmp_path):
    journal = tmp_path / "latency.jsonl"
    measure_latency(network, COST, mode="alone", timer=QUICK, journal=journal)
    with pytest.raises(TableError, match=r"measured with: .*cost_model.*this run has: .*cost_model:gflops=1"):
        measure_latency(network, CostModel(gflops=1.0), mode="alone", timer=QUICK, journal=journal)


def test_a_block_that_the_runtime_rejects_has_a_reason_and_the_rest_goes_on(network):
    @dataclasses.dataclass(frozen=True, slots=True)
    class Picky(CostModel):
        def compile(self, module, inputs):
            if any(getattr(part, "kernel_size", (1,))[0] >= 5 for part in module.modules()):
                raise BackendError("kernels of 5 and more are too large")
            return CostModel.compile(self, module, inputs)

    table = measure_latency(network, Picky(), timer=QUICK, networks=8)
    without = {entry.span: entry.reason for entry in table.entries if entry.time is None}
    large = {span for span in network.spans("paper") if max(network.merged_shape(span).kernel) >= 5}
    assert set(without) == large and large
    assert set(without.values()) == {"kernels of 5 and more are too large"}


@pytest.mark.parametrize("networks", [-7, 0, 1])
def test_a_calibration_on_fewer_than_two_networks_is_refused(network, networks):
    message = rf"needs two whole networks at least, found networks={networks}\..*mode=\"alone\""
    with pytest.raises(InvalidValue, match=message):
        measure_latency(network, COST, timer=QUICK, networks=networks)
    assert measure_latency(network, COST, timer=QUICK, mode="alone", networks=networks).calibration is None


def test_a_profile_of_nothing_is_refused():
    with pytest.raises(InvalidValue, match=r"profile_all\(\) needs one network at least, found none"):
        profile_all({}, torch.randn(1, 3, 8, 8), COST)


def test_an_unknown_mode_is_a_clear_error(network):
    with pytest.raises(InvalidValue, match="no mode 'isolated'; there are 'in context' and 'alone'"):
        measure_latency(network, COST, mode="isolated")


@pytest.mark.parametrize("share", [0.95, 0.8, 0.7])
def test_the_chosen_plan_meets_the_budget_and_no_better_one_does(network, frontier, share):
    original = milliseconds(network, network.vanilla)
    plan = choose(network, frontier, f"{share:.0%}", COST, timer=QUICK)
    assert milliseconds(network, plan.plan) <= share * original
    meeting = [p for p in frontier if milliseconds(network, p.plan) <= 0.98 * share * original]
    assert plan.importance == max(p.importance for p in meeting)


def hopeful(frontier, factor):
    """The frontier with predictions that are too low by a factor."""
    points = tuple(dataclasses.replace(point, latency=factor * point.latency) for point in frontier.points)
    segments = tuple(dataclasses.replace(segment, time=factor * segment.time) for segment in frontier.segments)
    return dataclasses.replace(frontier, points=points, segments=segments)


def test_a_wrong_frontier_is_put_right_by_the_stopwatch(network, frontier):
    """Predictions that are 30 % too low lead to plans that fail; the loop walks on until one fits."""
    wrong = hopeful(frontier, 0.7)
    original = milliseconds(network, network.vanilla)
    plan = choose(network, wrong, "80%", COST, timer=QUICK)
    assert milliseconds(network, plan.plan) <= 0.8 * original


def test_a_budget_out_of_reach_says_what_the_fastest_is(network, frontier):
    fastest = min(milliseconds(network, plan.plan) for plan in frontier)
    with pytest.raises(BudgetError, match=rf"the fastest one takes {fastest:.4g} ms"):
        choose(network, frontier, "5%", COST, timer=QUICK)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_with_few_steps_the_fastest_plan_is_timed_before_a_budget_is_out_of_reach(network, frontier, steps):
    """The only candidate misses the budget, and the fastest plan of all meets it."""
    original = milliseconds(network, network.vanilla)
    shares = [milliseconds(network, plan.plan) / original for plan in frontier]
    assert min(shares) == shares[0] < 0.6
    plan = choose(network, hopeful(frontier, 0.8), "70%", COST, timer=QUICK, steps=steps)
    assert milliseconds(network, plan.plan) <= 0.7 * original
    with pytest.raises(BudgetError, match=rf"the fastest one takes .* which is {shares[0]:.1%} of the") as raised:
        choose(network, hopeful(frontier, 0.8), "5%", COST, timer=QUICK, steps=steps)
    assert raised.value.fastest == pytest.approx(shares[0])


def test_where_the_runtime_rejects_the_fastest_plan_no_other_is_called_so(network, frontier):
    fastest = COST.compile(shallow_of(network, frontier[0].plan), tuple(network.inputs.args)).seconds()

    @dataclasses.dataclass(frozen=True, slots=True)
    class Picky(CostModel):
        def compile(self, module, inputs):
            compiled = CostModel.compile(self, module, inputs)
            if compiled.seconds() == pytest.approx(fastest):
                raise BackendError("not this one")
            return compiled

    second = milliseconds(network, frontier[1].plan) / milliseconds(network, network.vanilla)
    with pytest.raises(BudgetError, match=r"the fastest one that was timed takes") as raised:
        choose(network, frontier, "5%", Picky(), timer=QUICK)
    assert raised.value.fastest == pytest.approx(second)


def test_choosing_teaches_the_table(network, frontier, tmp_path):
    journal = tmp_path / "latency.jsonl"
    before = measure_latency(network, COST, timer=QUICK, networks=6, journal=journal)
    choose(network, frontier, "80%", COST, timer=QUICK, journal=journal)
    after = measure_latency(network, COST, timer=QUICK, networks=6, journal=journal)
    assert after.calibration.networks > before.calibration.networks
    with Notebook.open(journal, network, COST.environment(tuple(network.inputs.args))) as notebook:
        learnt = [plan for key, plan in notebook.plans.items() if key in notebook.shares and not notebook.timed(key)]
        _, *found = wholes(network, notebook, before.times, (network.vanilla, *learnt))
    assert found and [whole.segments for whole in found] == [network.segments(plan) for plan in learnt]
    for whole, plan in zip(found, learnt, strict=True):
        assert whole.latency == pytest.approx(milliseconds(network, plan))
        assert milliseconds(network, plan) < 0.9 * milliseconds(
            network, network.vanilla
        )  # a share that is no share would show
        assert after.predict(network, plan) == pytest.approx(milliseconds(network, plan), rel=0.02)


def test_what_choosing_measured_changes_the_prediction(network, frontier, tmp_path):
    """Plans that took twice as long, beside the original, as the table said: made again, it says more of them."""
    journal = tmp_path / "latency.jsonl"
    before = measure_latency(network, COST, timer=QUICK, networks=6, journal=journal)
    surprising = list(frontier)[: len(frontier) // 2]
    with Notebook.open(journal, network, COST.environment(tuple(network.inputs.args))) as notebook:
        for solved in surprising:
            notebook.keep_share(
                solved.plan, 2 * milliseconds(network, solved.plan) / milliseconds(network, network.vanilla)
            )
    with pytest.warns(DoubtfulTable):
        after = measure_latency(network, COST, timer=QUICK, networks=6, journal=journal)
    for solved in surprising:
        was = before.predict(network, solved.plan)
        assert was == pytest.approx(milliseconds(network, solved.plan), rel=0.02)
        assert 1.2 * was < after.predict(network, solved.plan) < 2.5 * was


def test_a_profile_counts_what_can_be_counted_by_hand():
    module = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, groups=8))
    x = torch.randn(2, 3, 10, 10)
    found = profile(module, x, COST, timer=QUICK)
    assert found.parameters == 3 * 8 * 9 + 8 + 8 * 9 + 8
    assert found.flops == 2 * 2 * 100 * (8 * 27 + 8 * 9)
    assert found.depth == 2
    assert found.latency == pytest.approx(COST.compile(module, (x,)).seconds() * 1000)
    assert found.memory is not None and found.memory >= 4 * (found.parameters + x.numel())


def test_peak_memory_is_more_than_what_the_network_holds_before_it_runs():
    """32 MB between two convolutions, beside weights and inputs of half of one."""
    module = nn.Sequential(nn.Conv2d(1, 64, 1), nn.Conv2d(64, 1, 1))
    found = profile(module, torch.randn(1, 1, 354, 354), COST, timer=QUICK)
    assert 32e6 < found.memory < 320e6


def test_profiles_side_by_side(network):
    both = {"before": shallow_of(network, network.vanilla), "after": shallow_of(network, plans(network, 3)[2])}
    text = side_by_side(profile_all(both, torch.randn(1, 3, 32, 32), COST, timer=QUICK))
    assert "before" in text and "after" in text and "times as fast" in text and "multiply-adds" in text


def test_a_rejected_layer_leaves_the_other_ways(network):
    """The last layer alone is rejected, so every plan must take it with others."""
    last = block_shape(network, Span(network.depth - 1, network.depth), batch=1)
    single = COST.compile(block_module(network, last), last.inputs()).seconds()

    @dataclasses.dataclass(frozen=True, slots=True)
    class Picky(CostModel):
        def compile(self, module, inputs):
            compiled = CostModel.compile(self, module, inputs)
            if compiled.seconds() == single:
                raise BackendError("not this one")
            return compiled

    table = measure_latency(network, Picky(), timer=QUICK, networks=8)
    assert Span(network.depth - 1, network.depth) not in table.times
    assert len(table.times) > len(table.entries) / 2


def test_a_runtime_that_rejects_everything_says_why(network):
    @dataclasses.dataclass(frozen=True, slots=True)
    class Broken(CostModel):
        def compile(self, module, inputs):
            raise BackendError("no such instruction")

    with pytest.raises(TableError, match="no whole network is left: no such instruction"):
        measure_latency(network, Broken(), timer=QUICK, networks=4)


def test_what_was_rejected_is_tried_again_when_asked(network, tmp_path):
    lacking = [True]

    @dataclasses.dataclass(frozen=True, slots=True)
    class Full(CostModel):
        def compile(self, module, inputs):
            if lacking and any(getattr(part, "kernel_size", (1,))[0] >= 5 for part in module.modules()):
                raise OutOfMemory("the neighbours took it all")
            return CostModel.compile(self, module, inputs)

    journal = tmp_path / "latency.jsonl"
    some = measure_latency(network, Full(), mode="alone", timer=QUICK, journal=journal)
    lacking.clear()
    assert measure_latency(network, Full(), mode="alone", timer=QUICK, journal=journal) == some
    whole = measure_latency(network, Full(), mode="alone", timer=QUICK, journal=journal, retry=True)
    assert len(some.times) < len(whole.times) == len(whole.entries)


def drifting(factor):
    """A machine whose pace changes by a factor whenever something is compiled."""
    pace = [1.0]

    class Slow:
        def __init__(self, compiled):
            self.compiled, self.close = compiled, compiled.close

        def seconds(self):
            return self.compiled.seconds() * pace[0]

    @dataclasses.dataclass(frozen=True, slots=True)
    class Backend(CostModel):
        def compile(self, module, inputs):
            pace[0] *= factor
            return Slow(CostModel.compile(self, module, inputs))

    return Backend()


@pytest.mark.parametrize("factor", [1.3, 0.8])
def test_a_machine_that_drifts_does_not_lead_to_a_plan_that_misses(network, frontier, factor):
    """Only what was timed together compares: against the original of a later step, an early failure would fit."""
    wrong = hopeful(frontier, 0.8)
    plan = choose(network, wrong, "80%", drifting(factor), timer=QUICK)
    assert milliseconds(network, plan.plan) <= 0.8 * milliseconds(network, network.vanilla)


def test_a_candidate_that_the_runtime_rejects_is_passed_over(network, frontier):
    wanted = choose(network, frontier, "80%", COST, timer=QUICK)
    refused = COST.compile(shallow_of(network, wanted.plan), tuple(network.inputs.args)).seconds()

    @dataclasses.dataclass(frozen=True, slots=True)
    class Picky(CostModel):
        def compile(self, module, inputs):
            compiled = CostModel.compile(self, module, inputs)
            if compiled.seconds() == pytest.approx(refused):
                raise BackendError("not this one")
            return compiled

    plan = choose(network, frontier, "80%", Picky(), timer=QUICK)
    assert plan.importance < wanted.importance
    assert milliseconds(network, plan.plan) <= 0.8 * milliseconds(network, network.vanilla)


def test_the_bar_of_a_search_that_ends_early_ends_with_it(network, frontier):
    lines = []
    choose(network, frontier, "80%", COST, timer=QUICK, steps=50, progress=progress_lines(lines.append, seconds=1e9))
    assert lines == ["candidates: 0 of 50", "candidates: 50 of 50, done"]


def test_choose_refuses_no_steps_and_foreign_frontiers(network, frontier):
    with pytest.raises(InvalidValue, match="steps=0"):
        choose(network, frontier, "80%", COST, timer=QUICK, steps=0)
    with pytest.raises(TableError, match="The frontier is of another network"):
        choose(network, dataclasses.replace(frontier, fingerprint="0123456789abcdef"), "80%", COST, timer=QUICK)


def test_a_journal_of_another_network_or_of_something_else_is_refused(network, tmp_path):
    other = df.trace(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)), torch.randn(1, 3, 32, 32))
    journal = tmp_path / "latency.jsonl"
    measure_latency(network, COST, mode="alone", timer=QUICK, journal=journal)
    with pytest.raises(TableError, match=r"belongs to something else"):
        measure_latency(other, COST, mode="alone", timer=QUICK, journal=journal)
    Journal.open(tmp_path / "other.jsonl", {"task": "something"}).close()
    with pytest.raises(TableError, match="is not one of latencies"):
        measure_latency(network, COST, mode="alone", timer=QUICK, journal=tmp_path / "other.jsonl")


def test_a_network_in_which_nothing_merges_has_nothing_to_calibrate():
    lone = df.trace(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), torch.randn(1, 3, 32, 32))
    with pytest.raises(TableError, match="nothing in this network can be merged"):
        measure_latency(lone, COST, timer=QUICK, networks=4)


def test_a_network_without_layers_has_nothing_to_time():
    """Traced on a single example without a batch, no convolution is a layer."""
    empty = df.trace(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), torch.randn(3, 32, 32))
    with pytest.raises(TableError, match=r"has no layers that can be timed\. Print it"):
        measure_latency(empty, COST, timer=QUICK, networks=4)
