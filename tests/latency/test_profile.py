"""Profiles of networks, including unusual inputs and failures."""

import dataclasses
import errno
import importlib
import subprocess
from pathlib import Path
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
    """Skip the process that measures memory: it takes seconds."""
    module = importlib.import_module("depthfold.latency.profile")
    monkeypatch.setattr(module, "peak_memory", lambda *_: (None, "not asked for"))


class DataDependent(nn.Module):
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


@pytest.mark.usefixtures("without_memory")
def test_latencies_and_the_memory_of_each_network_are_steps_of_the_progress():
    ticks = []

    def progress(what, total, done):
        ticks.append((what, total, done))
        return lambda: ticks.append("tick")

    profile_all({"before": nn.Conv2d(3, 4, 1), "after": nn.Conv2d(3, 5, 1)}, X, COST, timer=QUICK, progress=progress)
    assert ticks == [("latency and memory", 3, 0), "tick", "tick", "tick"]


@pytest.mark.parametrize("target", [COST, "pytorch"])
def test_data_dependent_network_is_profiled_without_memory(target):
    found = profile(DataDependent(), X, target, timer=QUICK)
    assert found.flops == 2 * 64 * 12 and found.memory is None
    assert found.memory_reason.startswith("torch.export cannot export it for the process that measures it: ")
    lines = str(found).splitlines()
    (row,) = [line for line in lines if line.startswith("peak memory, MB")]
    assert row.split(maxsplit=3)[3] == "not measured"
    assert lines[-1] == f"peak memory of network not measured: {found.memory_reason}"


def test_network_is_profiled_without_memory_if_the_disk_is_full(monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    found = profile(nn.Conv2d(3, 4, 1), X, "pytorch", timer=QUICK)
    assert found.memory is None and found.latency > 0
    assert "No space left on device" in found.memory_reason


def test_surrounding_autocast_changes_nothing(without_memory):
    class Masked(nn.Module):
        """A forward that runs only on real data, and not if the convolution returns bfloat16."""

        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x):
            x = x.clone()
            x[x > 0] = self.conv(x)[x > 0]
            return x

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert profile(Masked(), X, COST, timer=QUICK).flops == 2 * 64 * 9


@pytest.mark.slow
def test_table_shows_known_and_unknown_memory():
    both = {"plain": nn.Conv2d(3, 4, 1), "dependent": DataDependent()}
    found = profile_all(both, X, COST, timer=QUICK)
    text = side_by_side(found)
    assert f"{found['plain'].memory / 1e6:.4g}" in text and "not measured" in text
    assert "peak memory of dependent not measured: torch.export" in text
    assert "memory of plain not" not in text


def test_runtime_that_needs_an_export_refuses_a_data_dependent_network():
    with pytest.raises(BackendError, match="PyTorch cannot export this module to ONNX"):
        profile(DataDependent(), X, "onnxruntime", timer=QUICK)


@pytest.mark.parametrize("target", [COST, "onnxruntime"])
def test_named_inputs_are_put_in_order(target, without_memory):
    named = {"other": torch.randn(1, 5, 10, 10), "image": X}
    found = profile(TwoInputs(), named, target, timer=QUICK)
    assert found.flops == 2 * 64 * (12 + 4 * 45)
    assert found.environment.input_size == (3, 8, 8)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"image": X, "scale": X}, "The forward of TwoInputs takes 'scale' only by name"),
        ({"picture": X}, "do not fit the forward of TwoInputs: missing a required argument: 'image'. Use its names"),
        ({"image": X, "picture": X}, "do not fit the forward of TwoInputs: got an unexpected keyword argument"),
        ([X], "The example inputs of a profile must be tensors, found list"),
        ((X, 3), "The example inputs of a profile must be tensors, found Tensor, int"),
        ((), "The example inputs of a profile must be tensors, found nothing"),
    ],
)
def test_unsuitable_inputs_are_refused(inputs, message):
    with pytest.raises(InvalidValue) as caught:
        profile(TwoInputs(), inputs, COST, timer=QUICK)
    assert message in str(caught.value)


def test_input_without_a_batch_dimension_is_refused():
    message = r"a single example without a batch dimension \(3x8x8\).*batch of one: x\.unsqueeze\(0\)"
    for module in (nn.Sequential(nn.Conv2d(3, 4, 1)), DataDependent()):
        with pytest.raises(InvalidValue, match=message):
            profile(module, X[0], COST, timer=QUICK)


def test_network_that_adds_a_channel_dimension_takes_three_dimensions(without_memory):
    class Spectrogram(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 4, 1)

        def forward(self, x):
            return self.conv(x.unsqueeze(1))

    assert profile(Spectrogram(), torch.randn(1, 8, 8), COST, timer=QUICK).environment.batch == 1


def test_profile_of_a_single_sample(without_memory):
    once = Timer(warmup=0.0, round_seconds=0.0, samples=1, rounds=1, extra=0)
    found = profile(nn.Conv2d(3, 4, 1), X, COST, timer=once)
    assert found.count == 1 and found.spread == (found.latency, found.latency)
    assert f"{found.latency:.4g} to {found.latency:.4g}" in str(found)


@pytest.mark.parametrize(
    ("stderr", "message"), [("Traceback\nMemoryError: no more\n", "MemoryError: no more"), ("", "no message")]
)
def test_profile_survives_the_death_of_the_memory_process(monkeypatch, stderr, message):
    dead = SimpleNamespace(returncode=-9, stdout="", stderr=stderr)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: dead)
    found = profile(nn.Conv2d(3, 4, 1), X, COST, timer=QUICK)
    assert found.memory is None and found.latency > 0
    assert found.memory_reason == f"the process that measures it ended with code -9: {message}"


def test_profile_does_not_change_the_module(monkeypatch):
    # The module is exported for the process that measures memory, which is not started.
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1, stdout="", stderr=""))
    module = nn.Conv2d(3, 4, 1).double().train()
    profile(module, X.double(), COST, timer=QUICK)
    assert module.training and module.weight.dtype == torch.float64 and not module._forward_pre_hooks
    assert module.weight.device.type == "cpu" and module.weight.requires_grad


@dataclasses.dataclass(frozen=True, slots=True)
class SmallDevice(CostModel):
    """A device with memory for the small network only."""

    def compile(self, module, inputs):
        if next(module.parameters()).numel() > 20:
            raise OutOfMemory("no room")
        return CostModel.compile(self, module, inputs)


def test_message_advises_to_profile_alone_only_if_there_are_several_networks(without_memory):
    small, large = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 8, 1)
    with pytest.raises(OutOfMemory, match=r"The profile of 'after' cannot .*no room\. All .* profile each alone\."):
        profile_all({"before": small, "after": large}, X, SmallDevice(), timer=QUICK)
    with pytest.raises(OutOfMemory) as alone:
        profile(large, X, SmallDevice(), timer=QUICK)
    assert "each alone" not in str(alone.value)


def test_message_names_the_network_that_fails(without_memory):
    with pytest.raises(BackendError, match="The profile of 'after' cannot be measured"):
        profile_all({"before": nn.Conv2d(3, 4, 1), "after": nn.Conv2d(5, 4, 1)}, X, COST, timer=QUICK)


def test_counts_by_hand(without_memory):
    module = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, groups=8))
    x = torch.randn(2, 3, 10, 10)
    found = profile(module, x, COST, timer=QUICK)
    assert found.parameters == 3 * 8 * 9 + 8 + 8 * 9 + 8
    assert found.flops == 2 * 2 * 100 * (8 * 27 + 8 * 9)
    assert found.depth == 2
    assert found.latency == pytest.approx(COST.compile(module, (x,)).seconds() * 1000)


def test_peak_memory_contains_weights_inputs_and_live_feature_maps():
    """Three feature maps of 32 MB: before, between and after two activations."""
    found = profile(nn.Sequential(nn.ReLU(), nn.ReLU()), torch.randn(1, 64, 354, 354), COST, timer=QUICK)
    maps = 3 * 4 * 64 * 354**2
    assert maps <= found.memory < 1.1 * maps


def test_memory_is_not_reported_if_the_peak_cannot_be_reset(monkeypatch, tmp_path):
    """Importing PyTorch would be the peak, and a small network would seem to need no memory."""
    for reset in (tmp_path / "is not there" / "clear_refs", tmp_path):
        monkeypatch.setattr(high_water, "RESET", reset)
        with pytest.raises(SystemExit, match="this system cannot reset the peak memory of a process"):
            high_water.reset_high_water()


def test_memory_process_uses_one_core(monkeypatch):
    asked = []
    monkeypatch.setattr(high_water.os, "sched_getaffinity", lambda _: {3, 5, 7})
    monkeypatch.setattr(high_water.os, "sched_setaffinity", lambda *given: asked.append(given))
    monkeypatch.setattr(high_water.torch, "set_num_threads", asked.append)
    high_water.use_one_core()
    assert asked == [1, (0, {3})]


def test_profiles_side_by_side(traced, without_memory):
    both = {"before": sketch(rewrite(traced, traced.vanilla)), "after": sketch(rewrite(traced, plans(traced, 3)[2]))}
    text = side_by_side(profile_all(both, torch.randn(1, 3, 32, 32), COST, timer=QUICK))
    assert "before" in text and "after" in text and "times as fast" in text and "multiply-adds" in text


def test_profile_of_no_networks_is_refused():
    with pytest.raises(InvalidValue, match=r"profile_all\(\) needs at least one network"):
        profile_all({}, torch.randn(1, 3, 8, 8), COST)
