"""A network with activations of two kinds, on a runtime where one of them takes ten times as long."""

import json

import pytest
import torch
from torch import nn

import depthfold as df
from depthfold.core import LatencyTable, Plan
from depthfold.errors import InvalidValue
from depthfold.latency import measure_latency
from depthfold.latency.samples import plans_of_all_depths
from latency_workshop import COST, QUICK, Unfused, block_shape, plans
from latency_workshop import milliseconds as milliseconds_on

MISH, HARDSWISH = 40e-9, 4e-9  # seconds per element
UNFUSED = Unfused(costs=((nn.Mish, MISH), (nn.Hardswish, HARDSWISH)))


class Residual(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second
        self.a, self.b = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        return self.second(x + self.b(self.first(self.a(x))))


def network(*kinds):
    """Return a network of nine convolutions with one of these activations, by their numbers, after each."""
    torch.manual_seed(0)
    kinds = [kind() for kind in kinds]
    layers = [
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), kinds[1]), Residual(kinds[2], kinds[3]),
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), kinds[4]), nn.Sequential(nn.Conv2d(8, 8, 1), kinds[5]),
        Residual(kinds[6], kinds[7]), nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), kinds[8]),
    ]  # fmt: skip
    return df.trace(nn.Sequential(nn.Conv2d(3, 8, 1), kinds[0], *layers), torch.randn(1, 3, 24, 24))


M, H = nn.Mish, nn.Hardswish


@pytest.fixture(scope="module")
def traced():
    return network(M, M, H, M, H, H, M, M, H)


@pytest.fixture(scope="module")
def table(traced):
    return measure_latency(traced, UNFUSED, timer=QUICK)


def unseen(traced):
    """Yield random plans with activations of both kinds, of either, and without any."""
    kinds = [layer.activation for layer in traced.network.layers]
    for plan in plans(traced, 8):
        yield plan
        yield Plan([p for p in plan.activations if kinds[p - 1] == "mish"], plan.cuts)
        yield Plan([p for p in plan.activations if kinds[p - 1] == "hardswish"], plan.cuts)
        yield Plan((), plan.cuts)


def test_each_kind_has_its_own_cost(traced, table):
    calibration = table.calibration
    assert calibration.of_kind("mish").per_activation == pytest.approx(MISH * 1e9, rel=0.05)
    assert calibration.of_kind("hardswish").per_activation == pytest.approx(HARDSWISH * 1e9, rel=0.2)
    assert calibration.worst_error < 0.01
    for plan in unseen(traced):
        wanted = milliseconds_on(traced, plan, UNFUSED)
        assert table.predict(traced.network, plan) == pytest.approx(wanted, rel=0.01)


def test_entries_differ_by_the_activation_at_their_end(traced, table):
    for entry in table.entries:
        cost = {"mish": MISH, "hardswish": HARDSWISH}[traced.network.layers[entry.span.j - 1].activation]
        without, with_one = entry.times
        activation = 1e3 * cost * block_shape(traced, entry.span).elements[1]
        if not any(entry.floored):
            assert with_one - without == pytest.approx(activation, rel=0.2)
    assert LatencyTable.loads(table.dumps()) == table


def test_kind_of_one_layer_has_its_own_cost():
    """Few random plans leave it out by chance."""
    traced = network(H, H, H, H, M, H, H, H, H)
    table = measure_latency(traced, UNFUSED, timer=QUICK)
    assert table.calibration.of_kind("mish").per_activation == pytest.approx(MISH * 1e9, rel=0.05)
    assert table.calibration.worst_error < 0.01
    bare = Plan([p for p in range(1, 10) if p != 5], range(1, 9))
    assert table.predict(traced.network, bare) == pytest.approx(milliseconds_on(traced, bare, UNFUSED), rel=0.01)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("place", [1, 5, 8])
def test_enough_plans_leave_out_a_rare_kind(place, seed):
    traced = network(*(M if p == place else H for p in range(1, 10)))
    spans = traced.spans("paper")
    whole = list(plans_of_all_depths(traced.network, spans, 14, seed))
    thin = list(plans_of_all_depths(traced.network, spans, 14, seed, drop_activations=True))
    lacking = sum(place in one.activations - other.activations for one, other in zip(whole, thin, strict=True))
    assert lacking >= min(3, sum(place in one.activations for one in whole[1:]))
    assert thin[0] == traced.vanilla


@pytest.mark.parametrize("kinds", ["MMMMMMMMM", "MMHMHHMMH"])
def test_kinds_of_equal_or_no_cost_share_one(kinds):
    """A table with one cost is written as before there were several."""
    traced = network(*({"M": M, "H": H}[kind] for kind in kinds))
    for runtime in (COST, Unfused(costs=((nn.Mish, MISH), (nn.Hardswish, MISH)))):
        table = measure_latency(traced, runtime, timer=QUICK)
        found = {table.calibration.of_kind(kind).per_activation for kind in ("mish", "hardswish")}
        assert max(found) - min(found) < 0.01 * MISH * 1e9
        if kinds == "M" * 9:
            assert "per_kind" not in json.loads(table.dumps())["calibration"]


def test_file_with_a_negative_cost_of_a_kind_is_refused(table):
    broken = json.loads(table.dumps())
    broken["calibration"]["per_kind"] = [["hardswish", -1.0]]
    with pytest.raises(InvalidValue, match=r"The per_kind of hardswish .* must be 0 or more, found -1\.0"):
        LatencyTable.loads(json.dumps(broken))
