"""Every backend that runs on this machine passes the conformance suite; backends with a fault do not."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import nn

from depthfold.backends import get
from depthfold.backends.cost_model import CostModel
from depthfold.errors import BackendError
from depthfold.testing import backend_cases, check_backend
from depthfold.testing.backends import _check_clock
from lacking import devices, needs

# The suffix of files that they can export and open; a program of torch.export has a fixed layout and dtype.
TARGETS = {
    "pytorch": ".pt2",
    "pytorch:channels_last=true,threads=2": None,
    "pytorch:precision=bfloat16": None,
    "inductor": None,
    "onnxruntime": ".onnx",
    "onnxruntime:optimisation=none": ".onnx",
    "openvino": ".xml",
    "cost_model:noise=0.1": None,
}
ON_A_GPU = {
    f"{name}:device=cuda,precision={precision},channels_last={last}{more}": None
    for precision, last in (("float32", "false"), ("tf32", "true"), ("float16", "true"))
    for name, more in (("pytorch", ""), ("pytorch", ",cuda_graphs=true"), ("inductor", ""))
}
if "cuda" in devices():
    TARGETS |= ON_A_GPU
MARKS = {"openvino": needs("openvino")}


@pytest.mark.parametrize("target", [pytest.param(target, marks=MARKS.get(target, ())) for target in TARGETS])
def test_backend_conforms(target):
    cases = backend_cases()
    if target == "inductor":  # it compiles every network with a C++ compiler, which takes ten seconds
        cases = {"residual": cases["residual"]}
    check_backend(get(target), cases=cases, clock=not target.startswith("cost_model"), suffix=TARGETS[target])


def test_gpu_targets_are_valid():
    for target in ON_A_GPU:
        assert get(target).device == "cuda"


class Wrapped:
    """A compiled module with one fault."""

    def __init__(self, inner, fault):
        self.inner, self.fault = inner, fault

    def __call__(self):
        outputs = self.inner()
        if self.fault == "wrong":
            return tuple(tensor * 1.001 for tensor in outputs)
        if self.fault == "random":
            return tuple(tensor + 1e-5 * torch.randn_like(tensor) for tensor in outputs)
        return (*outputs, *outputs) if self.fault == "too many" else outputs

    def seconds(self):
        return {"NaN": math.nan, "zero": 0.0}.get(self.fault) if self.fault in ("NaN", "zero") else self.inner.seconds()

    def close(self):
        self.inner.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Faulty:
    """The cost model with one fault."""

    name: ClassVar[str] = "faulty"
    fault: str

    def environment(self, inputs):
        found = CostModel().environment(inputs)
        return replace(found, threads=None) if self.fault == "threads" else found

    def compile(self, module, inputs):
        if self.fault == "mode":
            module.eval()
        if self.fault == "weights":
            next(module.parameters()).data.mul_(2)
        if self.fault == "raw errors":
            module(*inputs)
        if self.fault == "keeps inputs":
            compiled = CostModel().compile(module, inputs)
            compiled._inputs = inputs
            return compiled
        return Wrapped(CostModel().compile(module, inputs), self.fault)

    def export(self, module, inputs, path, *, dynamic_batch=False):
        if self.fault == "export":
            return path
        if self.fault == "exports nothing":
            raise BackendError("It exports nothing.")
        if self.fault == "exports another":
            module = nn.Conv2d(4, 6, 3)
        return get("onnxruntime").export(module, inputs, path)

    def open(self, path, inputs):
        return get("onnxruntime").open(path, inputs)


FAULTS = {
    "wrong": "differs from eager PyTorch by",
    "random": "two runs differ by",
    "too many": "differs from eager PyTorch by inf",
    "NaN": "finite seconds above 0, found [nan",
    "zero": "finite seconds above 0, found [0.0",
    "threads": "environment: has no threads",
    "mode": "changed the module: training or evaluation mode",
    "weights": "changed the module: weight",
    "raw errors": "must raise BackendError, but raised RuntimeError",
    "keeps inputs": "differs from eager PyTorch by",
    "export": "which does not exist",
    "exports nothing": "export: it must write a .onnx file, but raised: It exports",
    "exports another": "export: the opened file differs from eager PyTorch by",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_suite_finds_the_fault(fault):
    cases = dict(list(backend_cases().items())[:3])
    with pytest.raises(AssertionError, match="does not conform") as caught:
        check_backend(Faulty(fault=fault), cases=cases, clock=False, suffix=".onnx")
    assert FAULTS[fault] in str(caught.value)


def test_backend_without_fault_conforms():
    check_backend(Faulty(fault="none"), clock=False, suffix=".onnx")
    check_backend(Faulty(fault="exports nothing"), clock=False)  # without a suffix it need not export


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherUnit:
    """PyTorch with seconds in another unit."""

    name: ClassVar[str] = "other_unit"
    factor: float

    def environment(self, inputs):
        return get("pytorch").environment(inputs)

    def compile(self, module, inputs):
        compiled = get("pytorch").compile(module, inputs)
        return Scaled(compiled, self.factor)

    def export(self, module, inputs, path):
        return CostModel().export(module, inputs, path)


class Scaled(Wrapped):
    def seconds(self):
        return self.inner.seconds() * self.fault


@pytest.mark.parametrize("factor", [1e3, 1e6, 1e-7], ids=["milliseconds", "microseconds", "far too short"])
def test_suite_compares_seconds_with_the_clock(factor):
    with pytest.raises(AssertionError, match=r"seconds\(\) returned \S+, but the call took \S+ s; exp"):
        check_backend(OtherUnit(factor=factor))
    check_backend(OtherUnit(factor=factor), clock=False)
    check_backend(OtherUnit(factor=1.0))
    check_backend(OtherUnit(factor=1e-2))  # like the mean of a hundred runs


def test_suite_suggests_clock_false_for_computed_seconds():
    with pytest.raises(AssertionError, match="If it is computed and not measured, use clock=False"):
        check_backend(CostModel())


def test_suite_accepts_an_interrupted_process():
    samples = [(1e-4, 2e-4), (1e-4, 60.0), (1e-4, 90.0)]
    assert not list(_check_clock(samples))
    assert len(list(_check_clock(samples[1:]))) == 1
