"""Profiles: what is counted and measured, and of networks that are not a plain chain of layers on one batch."""

import dataclasses
import importlib
import subprocess
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from depthfold.backends.cost_model import CostModel
from depthfold.errors import BackendError, InvalidValue, OutOfMemory
from depthfold.latency import Timer, high_water, profile, profile_all, side_by_side
from depthfold.merging import sketch
from depthfold.rewriting import rewrite
from latency_workshop import COST, QUICK, plans

X = torch.randn(1, 3, 8, 8)


@pytest.fixture
def without_memory(monkeypatch):
    """A process for the memory takes seconds, and is not what these tests are about."""
    module = importlib.import_module("depthfold.latency.profile")
    monkeypatch.setattr(module, "peak_memory", lambda *_: (None, "not asked for"))


class LooksAtItsData(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x):
        return self.conv(x) if x.sum() < float("inf") else x


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 4, 1), nn.Conv2d(5, 4, 3)

    def forward(self, image, other=None, *, scale=None):
        x = self.one(image)
        return x if other is None else x + self.two(other)


@pytest.mark.parametrize("target", [COST, "pytorch"])
def test_a_network_that_looks_at_its_data_is_profiled_without_its_memory(target):
    found = profile(LooksAtItsData(), X, target, timer=QUICK)
    assert found.flops == 2 * 64 * 12 and found.memory is None
    assert found.memory_reason.startswith("torch.export cannot export it for the process that measures it: ")
    lines = str(found).splitlines()
    (row,) = [line for line in lines if line.startswith("peak memory, MB")]
    assert row.split(maxsplit=3)[3] == "not measured"
    assert lines[-1] == f"peak memory of network not measured: {found.memory_reason}"


def test_where_one_memory_is_known_and_one_is_not_both_are_said():
    both = {"plain": nn.Conv2d(3, 4, 1), "clever": LooksAtItsData()}
    found = profile_all(both, X, COST, timer=QUICK)
    text = side_by_side(found)
    assert f"{found['plain'].memory / 1e6:.4g}" in text and "not measured" in text
    assert "peak memory of clever not measured: torch.export" in text
    assert "memory of plain not" not in text


def test_a_runtime_that_needs_a_graph_says_that_it_cannot_have_one():
    with pytest.raises(BackendError, match="PyTorch cannot export this module to ONNX"):
        profile(LooksAtItsData(), X, "onnxruntime", timer=QUICK)


@pytest.mark.parametrize("target", [COST, "onnxruntime"])
def test_named_inputs_are_put_in_order(target):
    named = {"other": torch.randn(1, 5, 10, 10), "image": X}
    found = profile(TwoInputs(), named, target, timer=QUICK)
    assert found.flops == 2 * 64 * (12 + 4 * 45)
    assert found.environment.input_size == (3, 8, 8)
    assert found.memory is not None


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"image": X, "scale": X}, "The forward of TwoInputs takes 'scale' only by name"),
        ({"picture": X}, "do not fit the forward of TwoInputs: missing a required argument: 'image'. Name them as"),
        ({"image": X, "picture": X}, "do not fit the forward of TwoInputs: got an unexpected keyword argument"),
        ([X], "A network is profiled on tensors, found list"),
        ((X, 3), "A network is profiled on tensors, found Tensor, int"),
        ((), "A network is profiled on tensors, found nothing"),
    ],
)
def test_inputs_that_no_runtime_takes_are_refused(inputs, message):
    with pytest.raises(InvalidValue) as caught:
        profile(TwoInputs(), inputs, COST, timer=QUICK)
    assert message in str(caught.value)


def test_a_single_example_is_refused_and_the_batch_of_one_is_named():
    """Its channels would be taken for a batch."""
    message = r"a single example without a batch \(3x8x8\).*batch of one: x\.unsqueeze\(0\)"
    for module in (nn.Sequential(nn.Conv2d(3, 4, 1)), LooksAtItsData()):
        with pytest.raises(InvalidValue, match=message):
            profile(module, X[0], COST, timer=QUICK)


def test_a_network_that_makes_its_own_channels_takes_three_dimensions(without_memory):
    class Spectrogram(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 4, 1)

        def forward(self, x):
            return self.conv(x.unsqueeze(1))

    assert profile(Spectrogram(), torch.randn(1, 8, 8), COST, timer=QUICK).environment.batch == 1


def test_a_single_sample_is_enough_for_a_profile(without_memory):
    once = Timer(warmup=0.0, round_seconds=0.0, samples=1, rounds=1, extra=0)
    found = profile(nn.Conv2d(3, 4, 1), X, COST, timer=once)
    assert found.count == 1 and found.spread == (found.latency, found.latency)
    assert f"{found.latency:.4g} to {found.latency:.4g}" in str(found)


@pytest.mark.parametrize(
    ("stderr", "said"), [("Traceback\nMemoryError: no more\n", "MemoryError: no more"), ("", "it said nothing")]
)
def test_where_the_process_that_measures_memory_dies_the_rest_of_the_profile_stays(monkeypatch, stderr, said):
    dead = SimpleNamespace(returncode=-9, stdout="", stderr=stderr)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: dead)
    found = profile(nn.Conv2d(3, 4, 1), X, COST, timer=QUICK)
    assert found.memory is None and found.latency > 0
    assert found.memory_reason == f"the process that measures it ended with code -9: {said}"


def test_the_users_module_is_left_alone():
    module = nn.Conv2d(3, 4, 1).double().train()
    profile(module, X.double(), COST, timer=QUICK)
    assert module.training and module.weight.dtype == torch.float64 and not module._forward_pre_hooks
    assert module.weight.device.type == "cpu" and module.weight.requires_grad


@dataclasses.dataclass(frozen=True, slots=True)
class OfOneNetwork(CostModel):
    """A device with room for one network."""

    def compile(self, module, inputs):
        if next(module.parameters()).numel() > 20:
            raise OutOfMemory("no room")
        return CostModel.compile(self, module, inputs)


def test_networks_that_do_not_fit_together_are_told_apart_from_one_that_does_not_fit(without_memory):
    small, large = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 8, 1)
    with pytest.raises(OutOfMemory, match=r"The profile of 'after' cannot .*no room\. They .* profile each alone\."):
        profile_all({"before": small, "after": large}, X, OfOneNetwork(), timer=QUICK)
    with pytest.raises(OutOfMemory) as alone:
        profile(large, X, OfOneNetwork(), timer=QUICK)
    assert "each alone" not in str(alone.value)


def test_a_network_that_does_not_run_is_named(without_memory):
    with pytest.raises(BackendError, match="The profile of 'after' cannot be measured"):
        profile_all({"before": nn.Conv2d(3, 4, 1), "after": nn.Conv2d(5, 4, 1)}, X, COST, timer=QUICK)


def test_a_profile_counts_what_can_be_counted_by_hand():
    module = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, groups=8))
    x = torch.randn(2, 3, 10, 10)
    found = profile(module, x, COST, timer=QUICK)
    assert found.parameters == 3 * 8 * 9 + 8 + 8 * 9 + 8
    assert found.flops == 2 * 2 * 100 * (8 * 27 + 8 * 9)
    assert found.depth == 2
    assert found.latency == pytest.approx(COST.compile(module, (x,)).seconds() * 1000)
    assert found.memory is not None


def test_peak_memory_is_that_of_weights_inputs_and_the_maps_that_live_at_once():
    """Three maps of 32 MB: before, between and after two activations, which need nothing else."""
    found = profile(nn.Sequential(nn.ReLU(), nn.ReLU()), torch.randn(1, 64, 354, 354), COST, timer=QUICK)
    maps = 3 * 4 * 64 * 354**2
    assert maps <= found.memory < 1.1 * maps


def test_where_a_high_water_mark_cannot_be_set_back_no_memory_is_stated(monkeypatch, tmp_path):
    """Then importing PyTorch was the highest point, and a small network would seem to need nothing."""
    for reset in (tmp_path / "is not there" / "clear_refs", tmp_path):
        monkeypatch.setattr(high_water, "RESET", reset)
        with pytest.raises(SystemExit, match="this system cannot set the high-water mark of a process back"):
            high_water.reset_high_water()


def test_the_process_that_measures_memory_stays_on_one_core(monkeypatch):
    asked = []
    monkeypatch.setattr(high_water.os, "sched_getaffinity", lambda _: {3, 5, 7})
    monkeypatch.setattr(high_water.os, "sched_setaffinity", lambda *given: asked.append(given))
    monkeypatch.setattr(high_water.torch, "set_num_threads", asked.append)
    high_water.use_one_core()
    assert asked == [1, (0, {3})]


def test_profiles_side_by_side(traced):
    both = {"before": sketch(rewrite(traced, traced.vanilla)), "after": sketch(rewrite(traced, plans(traced, 3)[2]))}
    text = side_by_side(profile_all(both, torch.randn(1, 3, 32, 32), COST, timer=QUICK))
    assert "before" in text and "after" in text and "times as fast" in text and "multiply-adds" in text


def test_a_profile_of_nothing_is_refused():
    with pytest.raises(InvalidValue, match=r"profile_all\(\) needs one network at least, found none"):
        profile_all({}, torch.randn(1, 3, 8, 8), COST)
