"""The cost of a latency table from shapes alone, and the blocks that are not worth measuring."""

import dataclasses
import warnings

import pytest
import torch
from torch import nn

import depthfold as df
from depthfold.backends.cost_model import CostModel
from depthfold.core import Environment, Span
from depthfold.errors import TableError
from depthfold.latency import Timer, measure, measure_latency
from depthfold.latency.blocks import block_module, block_shapes, dropped_shapes
from depthfold.latency.cannot_pay import FACTOR, LAUNCH_ON_CPU, blocks_that_cannot_pay
from depthfold.latency.cost import BYTES_KEPT, cost_of, measuring_cost
from depthfold.latency.measure import LargeMeasurement
from latency_workshop import COST, QUICK

CPU, GPU = Environment(device="cpu", threads=2), Environment(device="H200")


def deep(depth=7, channels=48, size=6):
    """Layers on a small map: each more merged layer adds a ring of weights, so that long spans cannot pay."""
    layers = (part for _ in range(depth) for part in (nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU()))
    return df.trace(nn.Sequential(*layers).eval(), torch.randn(1, channels, size, size))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OnCpu(CostModel):
    """Known latencies, in an environment of a CPU."""

    def environment(self, inputs):
        return dataclasses.replace(CostModel.environment(self, inputs), device="cpu")


def test_multiply_adds_are_those_of_pytorch():
    from torch.utils.flop_counter import FlopCounterMode

    traced = deep(3)
    for block in block_shapes(traced, traced.spans("full"), batch=2).values():
        with FlopCounterMode(display=False) as counter:
            block_module(traced, block)(*block.inputs())
        assert counter.get_total_flops() == 2 * block.multiply_adds


def test_only_blocks_with_more_of_everything_are_left_out(monkeypatch):
    monkeypatch.setattr("depthfold.latency.cannot_pay.LAUNCH_ON_CPU", 0)
    traced = deep()
    blocks = block_shapes(traced, traced.spans("full"))
    found = blocks_that_cannot_pay(blocks, {}, CPU)
    assert found
    for span, block in blocks.items():
        layers = [blocks[Span(l - 1, l)] for l in span.layers]
        work = block.multiply_adds / sum(layer.multiply_adds for layer in layers)
        moved = (block.parameters + sum(block.elements)) / sum(b.parameters + sum(b.elements) for b in layers)
        assert ((span, None) in found) == (min(work, moved) > FACTOR)
    reason = found[Span(0, traced.depth), None]
    assert reason.startswith("not measured: as one convolution it has") and "times the multiply-adds of its" in reason
    assert blocks_that_cannot_pay(blocks, {}, GPU) == {}  # its launches may take longer
    drops = dropped_shapes(traced.network, blocks, ("merge", "drop-layers"))
    assert {*found} <= {*blocks_that_cannot_pay(blocks, drops, CPU)}


def test_launches_protect_blocks_of_small_layers():
    traced = deep()
    assert LAUNCH_ON_CPU and not blocks_that_cannot_pay(block_shapes(traced, traced.spans("full")), {}, CPU)


def test_blocks_that_are_left_out_have_the_reason_and_change_no_fastest_plan(monkeypatch):
    monkeypatch.setattr("depthfold.latency.cannot_pay.LAUNCH_ON_CPU", 0)
    traced = deep()
    table = measure_latency(traced, OnCpu(launch_us=0.001), timer=QUICK, space="full")
    left_out = {entry.span for entry in table.entries if entry.reason and entry.reason.startswith("not measured: as")}
    assert left_out and not left_out & table.times.keys()
    assert len(table.entries) == len(traced.spans("full"))
    everything = measure_latency(traced, CostModel(launch_us=0.001), timer=QUICK, space="full", mode="alone").times
    for span in left_out:
        assert everything[span][1] > sum(everything[Span(l - 1, l)][1] for l in span.layers)
    monkeypatch.setattr("depthfold.latency.cannot_pay.FACTOR", 0)
    with pytest.raises(TableError, match=r"faster by merging: \d+ blocks of several layers would"):
        measure_latency(traced, OnCpu(), timer=QUICK, space="full")


def test_memory_counts_what_is_compiled_together(monkeypatch):
    traced = deep()
    blocks = block_shapes(traced, traced.spans("full"))
    sizes = {block.parameters + sum(block.elements) for block in {*blocks.values()}}
    cost = cost_of(traced, blocks, {}, GPU, 20, Timer())
    assert cost.blocks == len(sizes) and cost.left_out == 0
    assert cost.memory >= BYTES_KEPT * sum(sizes)
    with monkeypatch.context() as patch:
        patch.setattr("depthfold.latency.cost.MAX_ELEMENTS", max(sizes))
        assert cost_of(traced, blocks, {}, GPU, 20, Timer()).memory < cost.memory
    one, many = (
        measuring_cost(df.trace(traced.graph, torch.randn(n, 48, 6, 6)), OnCpu(), space="full") for n in (1, 64)
    )
    assert many.memory > one.memory and many.seconds > one.seconds
    assert "distinct blocks and 20 networks to time: up to" in str(cost)


def test_memory_that_may_run_out_gives_a_warning_beforehand(monkeypatch):
    traced = deep(2)
    monkeypatch.setattr(measure, "available_memory", lambda: 10**6)
    with pytest.warns(LargeMeasurement, match=r"may take most of the free memory \(1 MB\): .* MB of memory"):
        measure_latency(traced, COST, timer=QUICK)
    monkeypatch.setattr(measure, "available_memory", lambda: 10**11)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LargeMeasurement)
        measure_latency(traced, COST, timer=QUICK)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"networks": 2}, r"3 distinct blocks and 2 networks to time: "),
        ({"mode": "alone"}, r"3 distinct blocks to time: "),
    ],
)
def test_warning_is_about_what_is_missing_in_the_journal(monkeypatch, tmp_path, options, what):
    traced = deep(3)
    distinct = {*block_shapes(traced, traced.spans("paper")).values()}
    assert len(distinct) == 3
    monkeypatch.setattr(measure, "available_memory", lambda: 1)
    with pytest.warns(LargeMeasurement, match=what):
        measure_latency(traced, COST, timer=QUICK, run=tmp_path, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LargeMeasurement)
        measure_latency(traced, COST, timer=QUICK, run=tmp_path, **options)
    if "mode" in options:  # the networks are still missing
        with pytest.warns(LargeMeasurement, match="2 networks"):
            measure_latency(traced, COST, timer=QUICK, run=tmp_path, networks=2)


def test_estimated_time_is_that_of_the_given_timer_and_networks():
    traced = deep(3)
    blocks = block_shapes(traced, traced.spans("paper"))

    def seconds(networks, **options):
        return cost_of(traced, blocks, {}, CPU, networks, Timer(**options)).seconds

    many = seconds(0, round_seconds=10.0)  # 5 rounds of 10 s for each of 3 blocks
    assert many - seconds(0, round_seconds=0.0) == pytest.approx(3 * 50, rel=0.01)
    assert seconds(4, round_seconds=10.0) - many == pytest.approx(4 * 50, rel=0.01)
    assert seconds(0, round_seconds=0.0, samples=1000) > seconds(0, round_seconds=0.0, samples=1)
