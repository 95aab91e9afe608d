"""Peak memory on a GPU, tested on a CPU with replaced CUDA counters."""

import dataclasses
import importlib

import pytest
import torch
from torch import nn

from depthfold.backends.cost_model import CostModel
from depthfold.backends.torch_run import TorchOptions
from depthfold.latency.profile import RUNS, peak_memory

X = torch.randn(1, 4, 8, 8)
GPU = "A GPU"


@pytest.fixture
def events(monkeypatch):
    """Record the events of a fake GPU, which has 1000 bytes of other modules and a peak of 5000 bytes."""
    happened = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: GPU)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1000 + 4 * (4 * 6 + 6 + X.numel()))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: happened.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 5000)
    real = TorchOptions.moved

    def moved(place, module, inputs):
        precision = "float32" if place.precision == "tf32" else place.precision  # on a CPU there is no TF32
        return real(dataclasses.replace(place, device="cpu", precision=precision), module, inputs)

    monkeypatch.setattr(TorchOptions, "moved", moved)
    return happened


def watched(events):
    class Watched(nn.Conv2d):
        def forward(self, x):
            last = x.is_contiguous(memory_format=torch.channels_last)
            tf32 = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32  # the one is on by default
            events.append((x.dtype, self.weight.dtype, last, tf32, torch.is_inference_mode_enabled()))
            return super().forward(x)

    return Watched(4, 6, 1)


@pytest.mark.parametrize(
    ("precision", "runtime", "seen"),
    [
        ("float32", "pytorch", (torch.float32, torch.float32, False, False, True)),
        ("tf32", "pytorch", (torch.float32, torch.float32, False, True, True)),
        ("bfloat16", "inductor:mode=default", (torch.bfloat16, torch.bfloat16, False, True, True)),
        ("float32", "pytorch:channels_last=true", (torch.float32, torch.float32, True, False, True)),
        ("int8", "mine", (torch.float32, torch.float32, False, False, True)),
    ],
)
def test_memory_is_measured_in_the_precision_and_layout_of_the_environment(precision, runtime, seen, events):
    environment = CostModel().environment((X,))
    environment = dataclasses.replace(environment, device=GPU, precision=precision, runtime=runtime)
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    found, reason = peak_memory(watched(events), (X,), environment)
    assert reason is None
    assert events == [seen, "reset", *[seen] * RUNS]  # the peak is reset after the search for algorithms
    assert (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32) == before
    if torch.float32 in seen:
        assert found == 4000


def test_gpu_that_is_not_initialised_is_not_touched(monkeypatch):
    """If other processes use all of its memory, even asking for its name fails."""

    def busy(*_):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", busy)
    module = importlib.import_module("depthfold.latency.profile")  # the attribute of that name is the function
    monkeypatch.setattr(module, "_in_subprocess", lambda *_: 7)
    assert peak_memory(nn.Conv2d(4, 6, 1), (X,), CostModel().environment((X,))) == (7, None)
