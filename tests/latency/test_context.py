"""Blocks as they are timed, and the calibration that converts them to times in context."""

import json
from itertools import combinations, pairwise
from random import Random
from statistics import median, stdev

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import depthfold as df
from depthfold.backends.cost_model import CostModel
from depthfold.core import Calibration, ConvShape, Plan, Span
from depthfold.latency import measure_latency
from depthfold.latency.blocks import BlockShape, block_module
from depthfold.latency.calibration import Samples, TimedNetwork, fit
from depthfold.latency.samples import plans_of_all_depths
from latency_workshop import COST, QUICK, block_shape


def expected_block(module, inputs):
    """Compute the convolution and its additions by hand."""
    parts = dict(module.named_children())
    x = parts["conv"](inputs[0])
    for n, other in enumerate(inputs[1:]):
        x = x + (parts[f"projection{n}"](other) if f"projection{n}" in parts else other)
    return x


@pytest.mark.parametrize(
    ("span", "additions", "projected", "active"),
    [
        (Span(0, 1), 0, False, True),
        (Span(2, 3), 1, False, False),  # the end of a residual: its addition stays, and no activation follows
        (Span(1, 3), 1, False, True),  # after several layers, one is inserted
        (Span(0, 3), 0, False, True),  # the whole residual becomes part of the kernel
        (Span(11, 12), 1, True, False),
        (Span(10, 12), 1, True, True),
        (Span(9, 12), 0, False, True),
    ],
)
def test_block_module_computes_the_block(traced, span, additions, projected, active):
    block = block_shape(traced, span, batch=2)
    module, inputs = block_module(traced, block), block.inputs()
    assert len(inputs) == 1 + additions and inputs[0].shape[0] == 2
    assert ("projection0" in dict(module.named_children())) == projected
    with torch.no_grad():
        linear = expected_block(module, inputs)
        wanted = F.relu6(linear) if active else linear
        assert not active or not torch.equal(wanted, linear)
        torch.testing.assert_close(module(*inputs), wanted)


class Frames(nn.Module):
    """A video model: its first stage takes the frames as one batch, its second stage takes pairs of frames."""

    def __init__(self):
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())
        self.two = nn.Sequential(nn.Conv2d(8, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))

    def forward(self, x):
        x = self.one(x.flatten(0, 1))
        return self.two(x.reshape(-1, 8, 10, 10))


def test_blocks_have_the_batch_that_reaches_their_layers():
    traced = df.trace(Frames(), torch.randn(2, 16, 3, 10, 10))
    assert traced.network.barriers == (2,)
    table = measure_latency(traced, COST, mode="alone", timer=QUICK)
    assert set(table.times) == {Span(0, 1), Span(1, 2), Span(0, 2), Span(2, 3), Span(3, 4), Span(2, 4)}
    for span in table.times:
        merged = nn.Conv2d(*{0: (3, 4), 1: (4, 4), 2: (8, 4), 3: (4, 4)}[span.i], 1 + 2 * len(span), padding=len(span))
        x = torch.randn(32 if span.j <= 2 else 16, merged.in_channels, 10, 10)
        assert table.times[span][1] == pytest.approx(1000 * COST.compile(merged, (x,)).seconds())


def block(channels, out, size):
    shape = ConvShape(
        in_channels=channels, out_channels=out, kernel=(1, 1), stride=(1, 1), padding=((0, 0), (0, 0)), dilation=(1, 1)
    )
    return BlockShape(shape, (size, size), (), None, 3)


ONE_KIND = ("relu",) * 30  # at all positions


def timed(segments, latency):
    """Return a network without activations, like its blocks."""
    return TimedNetwork(segments, latency, frozenset())


def test_elements_are_those_of_the_input_and_the_output():
    assert block(5, 7, 10).elements == (3 * 5 * 100, 3 * 7 * 100)


def test_fit_finds_the_costs_of_the_formula():
    """Networks whose latencies follow the formula exactly."""
    rng = Random(0)
    spans = [Span(i, i + 1) for i in range(30)]
    blocks = {span: block(rng.randint(1, 400), rng.randint(1, 400), rng.randint(10, 100)) for span in spans}
    times = {span: rng.uniform(1.0, 5.0) for span in spans}
    slope, per_segment, per_element, outside = 0.9, -0.2, 0.1, 4.0

    def latency(segments):
        elements = sum(sum(blocks[span].elements) for span in segments) / 1e6
        alone = sum(times[span] for span in segments)
        return slope * alone + per_segment * len(segments) + per_element * elements + outside

    chosen = [tuple(rng.sample(spans, rng.randint(3, 25))) for _ in range(60)]
    found = fit(Samples([timed(segments, latency(segments)) for segments in chosen], blocks, times, ONE_KIND))
    assert (found.slope, found.per_segment) == (pytest.approx(slope, rel=0.05), pytest.approx(per_segment, abs=0.1))
    assert found.per_read == found.per_write == pytest.approx(per_element, rel=0.1)
    assert found.outside == pytest.approx(outside, rel=0.1)
    assert found.networks == 60 and found.worst_error < 0.02
    for segments in chosen:
        total = sum(found.in_context(times[span], *blocks[span].elements) for span in segments) + found.outside
        assert total == pytest.approx(latency(segments), rel=0.02)


@pytest.mark.parametrize("seed", range(6))
def test_no_block_is_far_from_its_time_alone_if_networks_are_faster_than_their_blocks(seed):
    """Networks take 1 ms less than their blocks in all, for example because of conversions that only these need.

    The networks do not tell reading from writing. With a cost of each, the fit gave blocks up to 30 times their time.
    """
    rng = Random(seed)
    sizes = [rng.choice((16, 64, 256)) for _ in range(13)]
    spans = [Span(i, j) for i in range(12) for j in range(i + 1, min(i + 4, 13))]
    blocks = {span: block(sizes[span.i], sizes[span.j], 20) for span in spans}
    times = {span: rng.uniform(0.2, 1.0) for span in spans}

    def whole(cuts):
        segments = tuple(map(Span, (0, *cuts), (*cuts, 12)))
        return timed(segments, (sum(times[span] for span in segments) - 1.0) * rng.gauss(1.0, 0.02))

    ways = [way for n in range(3, 12) for way in combinations(range(1, 12), n)]
    short = [way for way in ways if all(end - start <= 3 for start, end in pairwise((0, *way, 12)))]
    found = fit(Samples([whole(way) for way in rng.sample(short, 20)], blocks, times, ONE_KIND))
    shares = [found.in_context(times[span], *blocks[span].elements) / times[span] for span in spans]
    assert min(shares) > 0.25 and max(shares) < 1


def test_in_context_by_hand():
    calibration = Calibration(
        slope=0.5,
        per_segment=1.0,
        per_read=10.0,
        per_write=100.0,
        outside=0.0,
        networks=2,
        median_error=0,
        worst_error=0,
    )
    assert calibration.in_context(4.0, 2e6, 3e6) == pytest.approx(0.5 * 4 + 1 + 10 * 2 + 100 * 3)


def test_nearly_fastest_networks_are_part_of_the_calibration(traced, tmp_path):
    """The fastest plan of the table, found by exhaustive search, was timed as a whole network.

    On a machine that computes slowly the fastest plan is neither the deepest nor the shallowest, as random ones are.
    """
    slow = CostModel(gflops=0.2)
    journal = tmp_path / "latency.jsonl"
    table = measure_latency(traced, slow, timer=QUICK, networks=6, run=tmp_path)
    ways = {0: [()]}
    for end in range(1, traced.depth + 1):
        ways[end] = [(*way, span) for span in table.times if span.j == end for way in ways[span.i]]
    fastest = min(ways[traced.depth], key=lambda way: sum(table.times[span][1] for span in way))
    records = [json.loads(line) for line in journal.read_text().splitlines()[1:]]
    timed = {record["key"] for record in records if "samples" in record}
    plans = [
        Plan(activations=record["activations"], cuts=record["cuts"])
        for record in records
        if "cuts" in record and record["key"] in timed
    ]
    assert fastest in {traced.network.segments(plan) for plan in plans}
    assert fastest not in {
        traced.network.segments(plan) for plan in plans_of_all_depths(traced.network, table.times, 4)
    }
    assert len(plans) == table.calibration.networks


def test_no_block_is_free_and_errors_account_for_it():
    """Blocks take 0.1 ms less inside a network, short ones nearly nothing: no linear fit is right for both."""
    rng = Random(1)
    spans = [Span(i, i + 1) for i in range(12)]
    blocks = {span: block(4, 4, 10) for span in spans}
    times = {span: rng.choice((0.05, 0.2, 2.0)) for span in spans}

    def whole(chosen):
        latency = sum(max(times[span] - 0.1, 0.001) for span in chosen) * rng.uniform(0.98, 1.02)
        return timed(tuple(chosen), latency + 0.2)

    wholes = [whole(rng.sample(spans, rng.randint(4, 12))) for _ in range(8)]
    calibration = fit(Samples(wholes, blocks, times, ONE_KIND))
    read, written = blocks[spans[0]].elements
    moved = calibration.per_read * read / 1e6 + calibration.per_write * written / 1e6
    assert calibration.slope * 0.05 + calibration.per_segment + moved < 0
    assert calibration.in_context(0.05, read, written) == pytest.approx(0.001)  # a fiftieth of its time alone

    def error(n):
        others = fit(Samples([*wholes[:n], *wholes[n + 1 :]], blocks, times, ONE_KIND))
        inside = sum(others.in_context(times[span], *blocks[span].elements) for span in wholes[n].segments)
        return abs((others.outside + inside) / wholes[n].latency - 1)

    errors = [error(n) for n in range(len(wholes))]
    assert (calibration.median_error, calibration.worst_error) == pytest.approx((median(errors), max(errors)))


def test_entry_summarises_the_samples_of_the_journal(traced, tmp_path):
    """The deviation is on the scale of the times in context; the quartiles are of the block alone."""
    journal = tmp_path / "latency.jsonl"
    table = measure_latency(traced, CostModel(noise=0.05), timer=QUICK, run=tmp_path)
    samples = {}
    for record in map(json.loads, journal.read_text().splitlines()[1:]):
        samples[record["key"]] = [*samples.get(record["key"], ()), *record.get("samples", ())]
    for entry in table.entries:
        found = samples[block_shape(traced, entry.span).key]
        assert (entry.count, entry.quartiles[1]) == (len(found), pytest.approx(median(found)))
        assert entry.quartiles[0] <= entry.quartiles[1] <= entry.quartiles[2]
        assert entry.stdev == pytest.approx(table.calibration.slope * stdev(found))


def test_times_that_are_the_least_cost_of_a_block_are_marked(traced, monkeypatch):
    alone = {span: both[1] for span, both in measure_latency(traced, COST, mode="alone", timer=QUICK).times.items()}
    launch = median(alone.values())  # half of the blocks take less alone than the calibration subtracts
    calibration = Calibration(
        slope=1.0, per_segment=-launch, per_read=0.0, per_write=0.0, outside=0.5, networks=9, median_error=0.0,
        worst_error=0.0,
    )  # fmt: skip
    monkeypatch.setattr("depthfold.latency.measure.fit", lambda *_: calibration)
    table = measure_latency(traced, COST, timer=QUICK)
    for entry in table.entries:
        inside = entry.times[1] - (0.5 if entry.span.i == 0 else 0.0)
        floored = alone[entry.span] - launch < 0.02 * alone[entry.span]
        assert entry.floored == (floored, floored)
        assert inside == pytest.approx(0.02 * alone[entry.span] if floored else alone[entry.span] - launch)
        assert ("(floor)" in entry.row()[1]) == floored
    assert 0 < sum(entry.floored[1] for entry in table.entries) < len(table.entries)
    assert df.LatencyTable.loads(table.dumps()) == table
