"""The latency table on a runtime with computed times, so that the right result is known."""

import dataclasses
import json

import pytest
import torch
from torch import nn

import depthfold as df
from depthfold.backends.cost_model import CostModel
from depthfold.core import Span
from depthfold.errors import BackendError, InvalidValue, JournalError, OutOfMemory, TableError
from depthfold.latency import measure_latency
from depthfold.latency.blocks import block_module, block_shapes
from depthfold.store import Journal
from latency_workshop import COST, QUICK, block_shape, milliseconds, plans


def test_blocks_alone_have_the_times_of_the_cost_model(traced):
    table = measure_latency(traced, COST, mode="alone", timer=QUICK)
    assert set(table.times) == set(traced.spans("paper"))
    assert table.calibration is None
    for span in (Span(0, 1), Span(0, 3), Span(1, 3), Span(6, 8), Span(11, 12)):
        block = block_shape(traced, span)
        alone = COST.compile(block_module(traced, block), block.inputs()).seconds() * 1000
        assert table.times[span] == pytest.approx((alone, alone))


def test_sum_in_context_predicts_the_whole_network(traced):
    alone = measure_latency(traced, COST, mode="alone", timer=QUICK)
    table = measure_latency(traced, COST, timer=QUICK, networks=12)
    for plan in plans(traced, 12):
        wanted = milliseconds(traced, plan)
        assert table.predict(traced.network, plan) == pytest.approx(wanted, rel=0.02)
        assert alone.predict(traced.network, plan) > 1.2 * wanted  # every block pays the cost per network
    assert table.calibration.worst_error < 0.02
    assert df.LatencyTable.loads(table.dumps()) == table


def test_block_inside_a_residual_contains_its_addition(traced):
    """Also the projection of the skip."""
    (projected,) = [skip for skip in traced.network.skips if skip.projection]
    inside = block_shape(traced, Span(projected.target - 1, projected.target))
    whole = block_shape(traced, projected.span)
    assert len(inside.branches) == 1 and inside.branches[0].projection == projected.projection
    assert whole.branches == ()
    module = block_module(traced, inside)
    assert module(*inside.inputs()).shape == (1, 12, *traced.network.layers[projected.target - 1].out_size)


def test_equal_blocks_are_measured_once(traced):
    compiled = []

    @dataclasses.dataclass(frozen=True, slots=True)
    class Counting(CostModel):
        def compile(self, module, inputs):
            compiled.append(module)
            return CostModel.compile(self, module, inputs)

    measure_latency(traced, Counting(), mode="alone", timer=QUICK)
    shapes = set(block_shapes(traced, traced.spans("paper"), 1).values())
    assert len(compiled) == len(shapes) < len(traced.spans("paper"))


class Killed(Exception):
    pass


def test_interrupted_measurement_resumes(traced, tmp_path):
    """Interrupted at every tenth round: nothing is measured twice, and the table is that of a run without stops."""
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
            table = measure_latency(traced, COST, timer=QUICK, networks=6, run=tmp_path, progress=killer)
            break
        except Killed:
            continue
    whole = measure_latency(traced, COST, timer=QUICK, networks=6)
    assert table == whole
    distinct = len(set(block_shapes(traced, traced.spans("paper"), 1).values()))
    timed = {json.loads(line)["key"] for line in journal.read_text().splitlines()[1:]}
    assert len(timed) > distinct + 3 and taken == QUICK.rounds * len(timed)


def test_journal_of_another_environment_is_refused(traced, tmp_path):
    measure_latency(traced, COST, mode="alone", timer=QUICK, run=tmp_path)
    with pytest.raises(JournalError, match=r"environment.runtime: cost_model there, cost_model:gflops=1.0 here"):
        measure_latency(traced, CostModel(gflops=1.0), mode="alone", timer=QUICK, run=tmp_path)


def test_rejected_block_has_a_reason_and_the_others_are_timed(traced):
    @dataclasses.dataclass(frozen=True, slots=True)
    class Picky(CostModel):
        def compile(self, module, inputs):
            if any(getattr(part, "kernel_size", (1,))[0] >= 5 for part in module.modules()):
                raise BackendError("kernels of 5 and more are too large")
            return CostModel.compile(self, module, inputs)

    table = measure_latency(traced, Picky(), timer=QUICK, networks=8)
    without = {entry.span: entry.reason for entry in table.entries if entry.times is None}
    large = {span for span in traced.spans("paper") if max(traced.network.merged_shape(span).kernel) >= 5}
    assert set(without) == large and large
    assert set(without.values()) == {"kernels of 5 and more are too large"}


@pytest.mark.parametrize("networks", [-7, 0, 1, "5", 2.5])
def test_calibration_on_fewer_than_two_networks_is_refused(traced, networks):
    message = rf"The number of networks for the calibration must be an integer of at least 2, found {networks!r}"
    with pytest.raises(InvalidValue, match=message):
        measure_latency(traced, COST, timer=QUICK, networks=networks)
    assert measure_latency(traced, COST, timer=QUICK, mode="alone", networks=networks).calibration is None


def test_unknown_mode_is_refused(traced):
    with pytest.raises(InvalidValue, match=r"no mode 'isolated'\. Use 'in context' or 'alone'"):
        measure_latency(traced, COST, mode="isolated")


def test_plans_avoid_a_rejected_layer(traced):
    """The last layer alone is rejected, so every plan must merge it with others."""
    last = block_shape(traced, Span(traced.depth - 1, traced.depth))
    single = COST.compile(block_module(traced, last), last.inputs()).seconds()

    @dataclasses.dataclass(frozen=True, slots=True)
    class Picky(CostModel):
        def compile(self, module, inputs):
            compiled = CostModel.compile(self, module, inputs)
            if compiled.seconds() == single:
                raise BackendError("not this one")
            return compiled

    table = measure_latency(traced, Picky(), timer=QUICK, networks=8)
    assert Span(traced.depth - 1, traced.depth) not in table.times
    assert len(table.times) > len(table.entries) / 2


def test_runtime_that_rejects_everything_is_an_error_with_the_reason(traced):
    @dataclasses.dataclass(frozen=True, slots=True)
    class Broken(CostModel):
        def compile(self, module, inputs):
            raise BackendError("no such instruction")

    with pytest.raises(TableError, match="no whole network is left: no such instruction"):
        measure_latency(traced, Broken(), timer=QUICK, networks=4)


def test_retry_tries_rejected_blocks_again(traced, tmp_path):
    lacking = [True]

    @dataclasses.dataclass(frozen=True, slots=True)
    class Full(CostModel):
        def compile(self, module, inputs):
            if lacking and any(getattr(part, "kernel_size", (1,))[0] >= 5 for part in module.modules()):
                raise OutOfMemory("other processes use all of it")
            return CostModel.compile(self, module, inputs)

    some = measure_latency(traced, Full(), mode="alone", timer=QUICK, run=tmp_path)
    lacking.clear()
    assert measure_latency(traced, Full(), mode="alone", timer=QUICK, run=tmp_path) == some
    whole = measure_latency(traced, Full(), mode="alone", timer=QUICK, run=tmp_path, retry=True)
    assert len(some.times) < len(whole.times) == len(whole.entries)


def test_journal_of_another_network_or_another_kind_is_refused(traced, tmp_path):
    other = df.trace(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)), torch.randn(1, 3, 32, 32))
    measure_latency(traced, COST, mode="alone", timer=QUICK, run=tmp_path)
    with pytest.raises(JournalError, match=r"latency.jsonl was made from other inputs \(network: \w+ there, \w+ here"):
        measure_latency(other, COST, mode="alone", timer=QUICK, run=tmp_path)
    Journal(tmp_path / "other/latency.jsonl", {"task": "something"}).close()
    with pytest.raises(JournalError, match=r"was made from other inputs.*task: something there, none here"):
        measure_latency(traced, COST, mode="alone", timer=QUICK, run=tmp_path / "other")


def test_network_in_which_nothing_merges_is_refused():
    strided = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.Conv2d(4, 4, 3))
    with pytest.raises(TableError, match=r"Nothing in this network can be merged .* reasons, or try the search space"):
        measure_latency(df.trace(strided, torch.randn(1, 3, 32, 32)), COST, timer=QUICK, networks=4)
    lone = df.trace(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), torch.randn(1, 3, 32, 32))
    with pytest.raises(TableError, match=r"in the search space 'paper'\. .* reasons\.$"):
        measure_latency(lone, COST, timer=QUICK, networks=4)
    with pytest.raises(TableError, match=r"in the search space 'full'\. .* reasons\.$"):
        measure_latency(lone, COST, timer=QUICK, networks=4, space="full")


def test_network_without_layers_is_refused():
    """A convolution that was traced without a batch dimension is not a layer."""
    empty = df.trace(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), torch.randn(3, 32, 32))
    with pytest.raises(TableError, match=r"has no layers that can be timed\. Print the network"):
        measure_latency(empty, COST, timer=QUICK, networks=4)
