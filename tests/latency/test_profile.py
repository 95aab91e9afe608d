"""Profiles of networks that are not a plain chain of layers on one batch of images."""

import importlib
import subprocess
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from depthfold.errors import BackendError, InvalidValue
from depthfold.latency import Timer, profile, profile_all, side_by_side
from latency_workshop import COST, QUICK

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
    once = Timer(warmup=0.0, turn=0.0, samples=1, turns=1, extra=0)
    found = profile(nn.Conv2d(3, 4, 1), X, COST, timer=once)
    assert found.samples == (found.latency,) and found.spread == (found.latency, found.latency)
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
