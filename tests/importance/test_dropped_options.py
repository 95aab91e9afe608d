"""Importances of blocks with dropped layers and branches: the entries, the kept layers, the jobs and the journal."""

from __future__ import annotations

import copy
import json
import warnings
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision import models

import depthfold as df
from depthfold.core import BlockOption, Drops, FlaggedSpan, Move, Span, Timing, block_options
from depthfold.errors import InvalidValue, TableError
from depthfold.importance import entry as entries
from depthfold.importance import importance_options, importance_plan, layer_weights, measure_importance
from depthfold.importance.entry import job_key
from depthfold.importance.methods import RECALIBRATION
from depthfold.jobs import Outcome, Processes
from depthfold.stage_one import DROPS_SAVE_NO_TIME, LEFT_OUT, useless_options
from depthfold.training import recalibrate
from nets import Net, conv, image
from structures import mobilenet_v2
from tiny_importance import RECIPE, Tiny, TinyTask, holdout_score, scores_in, tiny_network

MOVES = get_args(Move)
NETWORK = tiny_network()
METHODS = ("trained", "brief", "recalibrated", "local", "fit")


class Counting:
    """An executor that runs nothing and gives every job the score 0."""

    def __init__(self):
        self.keys = []

    def run(self, setup, jobs):
        for job in jobs:
            self.keys.append(job.key)
            yield Outcome(key=job.key, result={"score": 0.0, "curve": [], "seconds": 0.0})


@pytest.mark.filterwarnings("ignore:The hold-out set")
def test_counts_of_mobilenet_v2():
    """Without stem and head, as in the paper and in LayerMerge."""
    blocks = models.mobilenet_v2(weights=None).features[1:18]
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(320, 3))
    traced = df.trace(model, torch.zeros(1, 32, 32, 32))
    for moves, number in ((MOVES[:1], 315), (MOVES[:2], 741), (MOVES, 805)):
        executor = Counting()
        table = measure_importance(traced, TinyTask(), RECIPE, moves=moves, executor=executor, method="trained")
        assert len(table.entries) == number
        assert len(set(executor.keys)) == number + 1  # the original network
        assert sum(bool(entry.dropped) for entry in table.entries) == number - 315


def test_an_inverted_residual_can_be_dropped_without_inserting_an_activation():
    """The exclusion rule of Appendix B.2 would insert one at the end of each, because both ends are linear."""
    network = mobilenet_v2()
    residual = Span(5, 8)
    dropped, merged = (
        {
            (block.a, block.b)
            for block, drops in block_options(network, "paper", MOVES)
            if block.span == residual and which(drops)
        }
        for which in (lambda drops: drops.branches, lambda drops: not drops.branches)
    )
    assert dropped == {(False, False), (False, True), (True, False), (True, True)}
    assert merged == {(False, True), (True, True)}
    chain = [(block.a, block.b) for block, drops in block_options(network, "paper", MOVES) if len(drops.branches) == 2]
    assert chain.count((False, False)) == chain.count((True, True)) > 0


def test_entries_of_a_small_network():
    """Layers 2, 3 and 5 keep their shape, and (1, 3] is a branch."""
    options = importance_options(NETWORK, "paper", MOVES)
    assert [option for option in options if not option.dropped] == [*map(BlockOption, NETWORK.flagged_spans())]
    weights = layer_weights(NETWORK)
    kept = max((2, 3), key=weights.get)
    other = 5 - kept
    found = {}
    for block, dropped in options:
        if dropped:
            found.setdefault(block.span, set()).add(dropped)
    # 3x3 and 5x5 kernels before the residual, which the 1x1 layer 5 does not change: it is kept in all of them.
    assert found == {
        Span(0, 3): {Drops([other]), Drops([2, 3])},
        Span(0, 4): {Drops([other]), Drops([2, 3])},
        Span(0, 5): {Drops([other]), Drops([2, 3])},
        Span(1, 3): {Drops([other]), Drops(branches=[Span(1, 3)])},
        Span(1, 4): {Drops([other]), Drops([2, 3])},
        Span(1, 5): {Drops([other]), Drops([2, 3])},
    }


def test_weight_of_a_layer_is_the_mean_of_its_folded_kernel():
    model = Tiny()
    weights = layer_weights(df.trace(model, torch.zeros(1, 2, 6, 6)))
    assert weights.keys() == {2, 3, 5}
    for l in weights:
        conv_l, norm = getattr(model, f"conv{l}"), getattr(model, f"norm{l}")
        scale = norm.weight / (norm.running_var + norm.eps).sqrt()
        assert weights[l] == pytest.approx((conv_l.weight * scale.view(-1, 1, 1, 1)).abs().mean().item(), rel=1e-5)


@pytest.mark.parametrize("larger", ["wide", "narrow"])
def test_of_several_sets_with_one_shape_the_layers_with_the_larger_weights_stay(larger):
    """Without layer 2 or layer 4, the merged convolution is the same. The sum would always keep the wide one."""

    def run(net, x):
        return net.last(F.relu(net.narrow(F.relu(net.back(F.relu(net.wide(F.relu(net.front(x)))))))))

    torch.manual_seed(0)
    parts = dict(front=conv(2, 16, 1), wide=conv(16, 16), back=conv(16, 4, 1), narrow=conv(4, 4), last=conv(4, 4, 1))
    for name in ("wide", "narrow"):
        parts[name].weight.data.fill_(0.11 if name == larger else 0.1)
    traced = df.trace(Net(run, **parts), image(channels=2))
    options = importance_options(traced, "full", MOVES)
    dropped = {option.dropped for option in options if option.block.span == Span(0, 4)}
    assert dropped == {Drops(), Drops([4 if larger == "wide" else 2]), Drops([2, 4])}


class Without(nn.Module):
    """Tiny without layers 2 and 3 or one of them, and without the activation between them, written by hand."""

    def __init__(self, dropped, active):
        super().__init__()
        self.net, self.dropped, self.active = copy.deepcopy(NET), dropped, active

    def forward(self, x):
        net = self.net
        x = F.relu(net.norm1(net.conv1(x)))
        if self.dropped == Drops([2]):
            x = net.norm3(net.conv3(x)) + x
        elif self.dropped == Drops([3]):
            x = net.norm2(net.conv2(x)) + x
        x = F.relu(x) if self.active else x
        x = F.relu(net.norm4(net.conv4(x)))
        return net.head(net.norm5(net.conv5(x)).mean((2, 3)))


NET = Tiny()


@pytest.mark.parametrize("method", ["recalibrated", "local", "fit"])
def test_scores_are_those_of_the_network_without_the_layers(method):
    """Nothing is left of a dropped branch that "local" could train or "fit" could fit."""
    table = measure_importance(NETWORK, TinyTask(), RECIPE, method=method, moves=MOVES)
    found = {(entry.span, entry.dropped): entry.samples for entry in table.entries}
    compared = 0
    for (block, dropped), samples in found.items():
        if block.span == Span(1, 3) and (dropped.branches or (dropped and method == "recalibrated")):
            by_hand = Without(dropped, active=block.b)
            steps = range(3) if method == "recalibrated" else range(3, 3 + RECALIBRATION)
            recalibrate(by_hand, TinyTask(), RECIPE, steps=steps, seed=RECIPE.seed)
            assert samples == pytest.approx((holdout_score(by_hand.eval()),), rel=1e-5)
            compared += 1
    assert compared == (4 if method == "recalibrated" else 2)
    assert len(set(found.values())) > 20


@pytest.mark.parametrize("method", METHODS)
def test_every_method_measures_every_option(method):
    table = measure_importance(NETWORK, TinyTask(), RECIPE, method=method, moves=MOVES)
    options = importance_options(NETWORK, "paper", MOVES)
    assert list(table.options) == sorted(options)
    plain = measure_importance(NETWORK, TinyTask(), RECIPE, method=method)
    assert [entry for entry in table.entries if not entry.dropped] == list(plain.entries)
    assert df.ImportanceTable.loads(table.dumps()) == table


def test_layer_of_a_dropped_branch_is_not_reinitialised():
    """The residual has a branch of one layer."""

    def run(net, x):
        x = F.relu(net.a(x))
        return net.head(F.relu(net.b(x) + x).mean((2, 3)))

    torch.manual_seed(0)
    traced = df.trace(Net(run, a=conv(2, 4), b=conv(4, 4), head=nn.Linear(4, 3)), torch.zeros(1, 2, 6, 6))
    table = measure_importance(traced, TinyTask(), RECIPE, moves=MOVES, method="trained")
    dropped = [entry for entry in table.entries if entry.dropped]
    assert {(entry.span.span, entry.dropped.branches) for entry in dropped} == {(Span(1, 2), (Span(1, 2),))}
    assert all(entry.samples for entry in table.entries)


@pytest.mark.slow
def test_two_workers_give_the_same_table_of_groups_with_two_seeds(monkeypatch):
    monkeypatch.setattr(entries, "TOGETHER", 4)
    here, there = (
        measure_importance(NETWORK, TinyTask(), RECIPE, method="local", moves=MOVES, seeds=2, executor=executor)
        for executor in (None, Processes(workers=2))
    )
    assert here == there


def test_key_of_a_job_is_the_old_one_if_nothing_is_dropped():
    block = FlaggedSpan(2, 9, True, False)
    assert job_key(BlockOption(block), 4) == "2-9-1-0 seed 4"
    assert job_key(BlockOption(block, Drops([3, 5], [Span(6, 9)])), 4) == "2-9-1-0 without 3 5 6:9 seed 4"


@pytest.mark.parametrize("method", ["recalibrated", "local"])
def test_journal_without_drops_is_resumed_with_them(method, tmp_path):
    task, run = TinyTask(folder=str(tmp_path)), tmp_path / "run"
    plain = measure_importance(NETWORK, task, RECIPE, method=method, run=run)
    before = scores_in(tmp_path)
    table = measure_importance(NETWORK, task, RECIPE, method=method, run=run, moves=MOVES)
    more = sum((scores_in(tmp_path) - before).values())
    assert more == sum(bool(entry.dropped) for entry in table.entries) == len(table.entries) - len(plain.entries)
    keys = [json.loads(line)["key"] for line in (run / "importance.jsonl").read_text().splitlines()[1:]]
    assert len(keys) == len(set(keys)) and sum("without" in key for key in keys) == more
    after = scores_in(tmp_path)
    assert measure_importance(NETWORK, task, RECIPE, method=method, run=run, moves=MOVES) == table
    assert measure_importance(NETWORK, task, RECIPE, method=method, run=run) == plain
    assert scores_in(tmp_path) == after


def times(network, saved=0.0, single=1.0):
    """Every layer takes this time, and every dropped layer of a merged block saves this. With single=0, all blocks take
    the same time."""
    entries = []
    for span in network.spans():
        for shape, dropped in df.core.span_options(network, span, MOVES).items():
            if dropped.kept(span):
                time = 1 + single * (len(span) - 1) - saved * len(dropped.missing)
                entries.append(Timing(span=span, times=(time, time), shape=shape if dropped else None))
    return df.LatencyTable(entries=tuple(entries), fingerprint=network.fingerprint)


def test_options_that_save_no_time_are_left_out(tmp_path):
    network, task = NETWORK.network, TinyTask(folder=str(tmp_path))
    full = measure_importance(NETWORK, TinyTask(), RECIPE, method="recalibrated", moves=MOVES)
    for saved in (0.0, 0.5):
        latency = times(network, saved)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            table = measure_importance(NETWORK, task, RECIPE, method="recalibrated", moves=MOVES, latency=latency)
            df.solve(latency, table, network=network)
        left_out = {(entry.span, entry.dropped) for entry in table.entries if entry.reason in LEFT_OUT}
        assert left_out == useless_options(network, latency, importance_options(NETWORK, "paper", MOVES))
        assert any(dropped.layers for _, dropped in left_out)
        rest = [entry for entry in table.entries if (entry.span, entry.dropped) not in left_out]
        assert rest == [entry for entry in full.entries if (entry.span, entry.dropped) not in left_out]


def test_with_reinitialised_layers_only_drops_are_left_out():
    recipe = RECIPE.replace(steps=1)
    table = measure_importance(
        NETWORK, TinyTask(), recipe, moves=MOVES, latency=times(NETWORK.network, single=0), method="trained"
    )
    left_out = [entry for entry in table.entries if entry.reason]
    assert left_out and all(entry.dropped and entry.reason == DROPS_SAVE_NO_TIME for entry in left_out)


def test_solver_warns_if_drops_that_were_left_out_save_time_now():
    network, slow = NETWORK.network, times(NETWORK.network, single=0)
    table = measure_importance(NETWORK, TinyTask(), RECIPE, method="recalibrated", moves=MOVES, latency=slow)
    with pytest.warns(UserWarning, match=r"leaves out \d+ blocks that saved no time .*; the first is .* without layer"):
        df.solve(times(network, 0.5, single=0), table, network=network)


def test_solver_warns_if_drops_were_left_out_and_cuts_are_fixed():
    latency = times(NETWORK.network, single=0)
    table = measure_importance(NETWORK, TinyTask(), RECIPE, method="recalibrated", moves=MOVES, latency=latency)
    with pytest.warns(
        UserWarning, match=r"leaves out \d+ blocks that save no time if S is free, .* Measure the"
    ) as seen:
        df.solve(latency, table, network=NETWORK.network, merge_along="B")
    assert seen[0].filename == __file__


def test_wrong_moves_are_refused(tmp_path):
    def refused(text, error=InvalidValue, **options):
        with pytest.raises(error, match=text):
            measure_importance(NETWORK, TinyTask(), RECIPE, run=tmp_path / "run", **options)
        assert not (tmp_path / "run").exists()

    known = "The moves are 'merge', 'drop-layers', 'drop-branches'.$"
    refused(f"^There is no move 'drop-layer'. Did you mean 'drop-layers'\\? {known}", moves=("merge", "drop-layer"))
    refused("There is no move 'merge,drop-layers'. Name each move separately. The moves", moves=("merge,drop-layers",))
    refused("^The moves must be some of 'merge', .*, found None.$", moves=None)
    plain = df.LatencyTable(entries=tuple(e for e in times(NETWORK.network).entries if e.shape is None))
    text = r"^The latency table has no entry for \(0, 3\] as .*, which is left without .* depthfold latency --moves"
    refused(text, TableError, moves=MOVES, latency=plain, method="recalibrated")


def test_moves_may_be_any_iterable():
    options = importance_options(NETWORK, "paper", MOVES)
    assert importance_options(NETWORK, "paper", iter(reversed(MOVES))) == options
    assert importance_options(NETWORK, "paper", "merge") == importance_options(NETWORK)


def test_plan_of_an_option_drops_only_inside_the_block():
    for block, dropped in importance_options(NETWORK, "full", MOVES):
        plan = importance_plan(NETWORK.network, block, dropped)
        assert plan.dropped == dropped == dropped.within(block.span)
        assert block.span in NETWORK.network.segments(plan)
