"""Latency entries of spans with dropped layers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import depthfold as df
from depthfold.backends import get
from depthfold.core import Drops, Plan
from depthfold.core.options import span_options
from depthfold.errors import TableError
from depthfold.latency import measure_latency
from depthfold.latency.journal import LatencyJournal
from depthfold.latency.measure import timed_networks
from tiny_importance import tiny_network

MOVES = ("merge", "drop-layers", "drop-branches")


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.one, self.two = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        x = torch.relu(self.first(x))
        return torch.relu(x + self.two(torch.relu(self.one(x))))


@pytest.fixture(scope="module")
def traced():
    torch.manual_seed(0)
    return df.trace(Residual(), torch.randn(2, 3, 12, 12))


def test_every_other_shape_has_an_entry(traced):
    table = measure_latency(traced, "cost_model", moves=MOVES)
    wanted = {
        (span, shape)
        for span in traced.spans()
        for shape, dropped in span_options(traced.network, span, MOVES).items()
        if dropped
    }
    assert {(entry.span, entry.shape) for entry in table.entries if entry.shape} == wanted
    assert wanted
    assert [entry for entry in table.entries if not entry.shape] == list(measure_latency(traced, "cost_model").entries)


def test_a_smaller_shape_takes_less_time(traced):
    table = measure_latency(traced, "cost_model", moves=MOVES)
    times = {(entry.span, entry.shape): entry.times for entry in table.entries}
    span = df.Span(1, 3)
    empty, smaller = sorted((shape for other, shape in times if other == span and shape), key=lambda s: s.kernel)
    assert (empty.kernel, smaller.kernel) == ((1, 1), (3, 3))
    assert times[span, empty][0] == 0 < times[span, smaller][0]
    assert times[span, smaller][0] < times[span, None][0]
    one_layer = times[df.Span(1, 2), None]  # the same convolution
    assert times[span, smaller] == pytest.approx(one_layer, rel=1e-9)


@pytest.mark.parametrize("mode", ["in context", "alone"])
def test_dropped_first_branch_takes_as_long_after_a_csv_file(mode, tmp_path):
    """The first branch starts at position 0, where everything outside the spans is also due."""
    torch.manual_seed(0)
    model = Residual()
    traced = df.trace(model, torch.randn(2, 3, 12, 12), ignore=["first"])
    table = measure_latency(traced, "cost_model", moves=MOVES, mode=mode)
    table.write_csv(tmp_path / "table.csv")
    read = df.LatencyTable.read_csv(tmp_path / "table.csv")
    plan = Plan(traced.network.activations - {1}, (), Drops(branches=[df.Span(0, 2)]))
    outside = table.calibration.outside if table.calibration else 0.0
    assert read.predict(traced.network, plan) == table.predict(traced.network, plan) >= outside
    without = dataclasses.replace(read, entries=[entry for entry in read.entries if entry.shape is None])
    with pytest.raises(TableError, match=r"no time for \(0, 2\] as 1x1"):
        without.predict(traced.network, plan)


def test_solver_uses_the_entries(traced):
    table = measure_latency(traced, "cost_model", moves=MOVES)
    entries = [
        df.core.Score(span=block, samples=(-0.6 * len(dropped.layers) - len(dropped.branches),), dropped=dropped)
        for block in traced.flagged_spans()
        for dropped in span_options(traced.network, block.span, MOVES).values()
    ]
    importance = df.ImportanceTable(
        network=traced.network.name, fingerprint=traced.network.fingerprint, entries=tuple(entries)
    )
    frontier = df.solve(table, importance, network=traced.network)
    assert any(point.dropped.layers for point in frontier.points)
    assert any(point.dropped.branches for point in frontier.points)
    for plan in frontier:
        assert table.predict(traced.network, plan) == plan.latency


def test_journal_keeps_the_drops_of_a_plan_and_calibrates_without_it(tmp_path):
    """choose() times plans with drops, and their segments are not the whole spans."""
    traced = tiny_network()
    environment = get("cost_model").environment(traced.example_tensors())
    network, cuts = traced.network, traced.vanilla.cuts
    plain, dropping = (Plan(network.activations, cuts, dropped) for dropped in (Drops(), Drops([2])))
    with LatencyJournal(tmp_path, traced, environment) as journal:
        assert journal.add_plan(plain) == f"plan {sorted(plain.activations)} {list(plain.cuts)}"  # as before drops
        keys = {journal.add_plan(plan) for plan in (plain, dropping, Plan(plain.activations, cuts, Drops([3])))}
        assert len(keys) == 3
        for plan, share in ((dropping, 0.1), (Plan((), (3,)), 0.5)):
            journal.add_share(plan, share)
        journal.rounds[journal.add_plan(network.vanilla)].append((2.0,))
    with LatencyJournal(tmp_path, traced, environment) as journal:
        assert set(journal.plans.values()) >= {plain, dropping}
        journal.rounds[journal.add_plan(network.vanilla)].append((2.0,))
        times = dict.fromkeys(network.spans("full"), 1.0)
        timed = timed_networks(network, journal, times, journal.plans.values())
    assert sorted(each.latency for each in timed) == [1.0, 2.0]
