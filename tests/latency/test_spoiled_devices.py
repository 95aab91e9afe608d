"""An unusable device: after an illegal access, every later call fails in the same process."""

import dataclasses
import json

import pytest
import torch

from depthfold.backends.base import backend_errors
from depthfold.backends.cost_model import CostModel
from depthfold.errors import BackendError, OutOfMemory, SpoiledDevice, spoils_device
from depthfold.latency import choose, measure_latency, profile
from depthfold.merging import sketch
from depthfold.rewriting import rewrite
from latency_workshop import COST, QUICK

ILLEGAL = "CUDA error: an illegal memory access was encountered"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spoilt(CostModel):
    """A device that becomes unusable at call `calls[0]`; after that every call fails, including close()."""

    calls: list
    error: object = RuntimeError(ILLEGAL)

    def environment(self, inputs):
        return COST.environment(inputs)

    def call(self):
        self.calls[0] -= 1
        if self.calls[0] <= 0:
            raise self.error

    def compile(self, module, inputs):
        self.call()
        return _Spoilt(self, CostModel.compile(self, module, inputs))


class _Spoilt:
    def __init__(self, device, compiled):
        self.device, self.compiled = device, compiled

    def seconds(self):
        self.device.call()
        return self.compiled.seconds()

    def close(self):
        if self.device.calls[0] <= 0:
            raise self.device.error


def reasons_in(journal):
    return [record for line in journal.read_text().splitlines() if "reason" in (record := json.loads(line))]


@pytest.mark.parametrize("error", [RuntimeError(ILLEGAL), BackendError(f"PyTorch cannot run this module: {ILLEGAL}")])
@pytest.mark.parametrize("calls", [1, 60, 125])
def test_unusable_device_ends_the_measurement_and_the_next_run_resumes(traced, tmp_path, calls, error):
    """While blocks are compiled, while they are timed, or later with whole networks."""
    journal = tmp_path / "latency.jsonl"
    given = dict(timer=QUICK, networks=6, run=tmp_path)
    with pytest.raises(SpoiledDevice, match=r"illegal memory access.*device is now unusable.*Start again"):
        measure_latency(traced, Spoilt(calls=[calls], error=error), **given)
    assert reasons_in(journal) == []
    before = journal.read_text()
    assert measure_latency(traced, COST, **given) == measure_latency(traced, COST, timer=QUICK, networks=6)
    assert journal.read_text().startswith(before)


def test_choose_stops_on_an_unusable_device(traced, frontier):
    for calls in (1, 4, 6, 8):
        with pytest.raises(SpoiledDevice, match="illegal memory access"):
            choose(traced, frontier, "80%", Spoilt(calls=[calls]), timer=QUICK)


def test_profile_stops_on_an_unusable_device(traced):
    for calls in (1, 3):
        with pytest.raises(SpoiledDevice, match="illegal memory access"):
            profile(
                sketch(rewrite(traced, traced.vanilla)), torch.randn(1, 3, 32, 32), Spoilt(calls=[calls]), timer=QUICK
            )


PYTORCH_ADDS = "\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."


@pytest.mark.parametrize(
    ("message", "spoils"),
    [
        (ILLEGAL + PYTORCH_ADDS, True),
        ("CUDA error: device-side assert triggered" + PYTORCH_ADDS, True),
        ("Error Code 1: Cuda Runtime (an illegal memory access was encountered)", True),
        ("CUDA failure 719: unspecified launch failure", True),
        ("CUDA error: invalid configuration argument" + PYTORCH_ADDS, False),
        ("CUDA error: no kernel image is available for execution on the device" + PYTORCH_ADDS, False),
        ("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx`", False),
        ("CUDA error: out of memory" + PYTORCH_ADDS, False),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", False),
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", False),
        ("FIND was unable to find an engine to execute this computation", False),
        ("CUDA error: operation not permitted when stream is capturing" + PYTORCH_ADDS, False),
        ("CUDA error: operation failed due to a previous error during capture" + PYTORCH_ADDS, False),
        ("kernel size can't be greater than actual input size", False),
    ],
)
def test_kinds_of_errors_of_a_device(message, spoils):
    error = RuntimeError(message)
    assert spoils_device(error) == spoils
    memory = any(sign in message for sign in ("out of", "ALLOC", "NOT_INITIALIZED", "FIND"))
    kind = SpoiledDevice if spoils else OutOfMemory if memory else BackendError
    with (
        pytest.raises(kind, match="PyTorch cannot run this module: ") as raised,
        backend_errors("PyTorch cannot run this module"),
    ):
        raise error
    assert type(raised.value) is kind and raised.value.__cause__ is error


def test_nested_backend_errors_give_one_message():
    with (
        pytest.raises(SpoiledDevice) as raised,
        backend_errors("It ran once and then failed"),
        backend_errors("PyTorch cannot run it"),
    ):
        raise RuntimeError(ILLEGAL)
    assert str(raised.value).startswith("PyTorch cannot run it: CUDA error") and str(raised.value).count("CUDA") == 1
