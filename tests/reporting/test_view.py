"""The view data of the page, compared with the tables and plans that it is taken from."""

import dataclasses
import json
from itertools import pairwise

import pytest

from depthfold.core import Span
from depthfold.core.latency_table import sum_times
from depthfold.reporting import format
from depthfold.reporting.view import explorer_data, select_plans
from runs import WITHOUT, every_subset, made_up_run
from structures import chain, plain_chain, resnet34, vgg19

NETWORKS = {"mobilenet_v2": None, "resnet34": resnet34(), "vgg19": vgg19(), "chain": chain(3, 1, 5, 3)}


@pytest.fixture(params=NETWORKS, scope="module")
def findings(request):
    return made_up_run(NETWORKS[request.param], seed=3)


@pytest.fixture
def data(findings):
    return json.loads(json.dumps(explorer_data(findings, select_plans(findings.frontier, findings.plan))))


def test_segments_of_each_plan_sum_to_its_latency(findings, data):
    assert len(data["plans"]) == len(findings.frontier)
    for plan, solved in zip(data["plans"], findings.frontier, strict=True):
        parts = [data["segments"][index] for index in plan["segments"]]
        times = [active if j in plan["activations"] else bare for _, j, active, bare, *_ in parts]
        assert sum_times(times) == plan["ms"] == solved.latency
        assert [(i, j) for i, j, *_ in parts] == list(pairwise((0, *solved.plan.cuts, findings.network.depth)))


def test_plans_have_their_activations_and_importances(findings, data):
    for plan, solved in zip(data["plans"], findings.frontier, strict=True):
        assert frozenset(plan["activations"]) == solved.plan.activations
        assert plan["importance"] == solved.importance
    own = {l for l, layer in enumerate(data["layers"], start=1) if layer["activation"] is not None}
    assert own == findings.network.activations
    assert data["inserted"] == findings.network.main_activation


def test_each_segment_occurs_once_with_its_merged_kernel(findings, data):
    spans = [(i, j) for i, j, *_ in data["segments"]]
    assert len(set(spans)) == len(spans)
    for i, j, active, bare, replaced, shape in data["segments"]:
        merged = findings.network.merged_shape(Span(i, j))
        kernel, channels = merged.kernel, (merged.in_channels, merged.out_channels)
        assert shape.startswith("×".join(map(str, kernel)))  # noqa: RUF001
        assert f"{channels[0]} → {channels[1]}" in shape
        assert ("depth-wise" in shape) == (merged.groups == channels[0] == channels[1] > 1)
        assert (active, bare) == findings.latency.times[Span(i, j)][::-1]
        assert (active == bare) == (j - i not in WITHOUT and (i, j) != (2, 3))
        singles = [layer["ms"] for layer in data["layers"][i:j]]
        assert replaced == pytest.approx(sum(singles))


def test_layers_skips_and_barriers_are_those_of_the_network(findings, data):
    network = findings.network
    assert [layer["name"] for layer in data["layers"]] == [layer.where for layer in network.layers]
    assert data["skips"] == [[skip.source, skip.target] for skip in network.skips]
    assert data["barriers"] == list(network.barriers)
    assert data["original"] == findings.frontier.original


def test_chosen_plan_is_at_its_index(findings, data):
    chosen = data["plans"][data["chosen"]]
    assert chosen["ms"] == findings.plan.latency
    assert frozenset(chosen["activations"]) == findings.plan.plan.activations


def test_a_short_frontier_is_shown_whole():
    findings = made_up_run(seed=3)
    plans = select_plans(findings.frontier, findings.plan, most=len(findings.frontier))
    assert plans.points == findings.frontier.points
    assert not plans.thinned
    assert plans.on_frontier
    assert select_plans(findings.frontier, findings.plan, most=len(findings.frontier) - 1).thinned


@pytest.mark.parametrize("chosen", [0, 1, 777, 2046, 2047])
def test_a_long_frontier_is_thinned_to_the_answers_of_evenly_spaced_budgets(chosen):
    frontier = every_subset(plain_chain(12))
    plans = select_plans(frontier, frontier[chosen], most=100)
    first, last = frontier.points[0].latency, frontier.points[-1].latency
    answers = {frontier.at(f"{first + (last - first) * n / 99!r}ms").latency for n in range(99)} | {last}
    latencies = [point.latency for point in plans.points]
    best = frontier[2046]  # the slowest that merges something
    assert set(latencies) == answers | {frontier[chosen].latency, best.latency}
    assert latencies[plans.best] == best.latency
    assert latencies == sorted(latencies)
    assert (latencies[0], latencies[-1]) == (first, last)
    assert plans.points[plans.chosen] == frontier.points[chosen]
    assert plans.thinned
    assert plans.of == 2048


def test_a_chosen_plan_off_the_frontier_is_inserted_by_its_latency():
    findings = made_up_run(seed=3)
    frontier = findings.frontier
    lacking = dataclasses.replace(frontier, points=(*frontier.points[:3], *frontier.points[4:]))
    plans = select_plans(lacking, frontier[3])
    assert plans.points == frontier.points
    assert plans.chosen == 3
    assert not plans.on_frontier
    data = explorer_data(dataclasses.replace(findings, frontier=lacking, plan=frontier[3]), plans)
    assert data["plans"][3]["ms"] == frontier[3].latency


def test_shapes_are_printed_with_typographic_signs():
    layer = made_up_run().network.layers[0]
    assert str(layer.shape) == "3x3, 32 -> 32, depth-wise"
    assert format.shape(layer.shape) == "3×3, 32 → 32, depth-wise"  # noqa: RUF001
