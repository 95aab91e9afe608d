"""OpenVINO on the CPU."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from depthfold.backends.base import Compiled, Inputs, expect_suffix, expect_threads, in_float32, reasons
from depthfold.backends.machine import environment_of, thread_count
from depthfold.backends.onnx_writer import onnx_bytes
from depthfold.backends.registry import spelled
from depthfold.core import Environment
from depthfold.errors import BackendError
from depthfold.support.document import decode
from depthfold.support.optional import load

Precision = Literal["float32", "bfloat16", "float16"]
_HINTS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
_CAPABILITIES = {"float32": "FP32", "bfloat16": "BF16", "float16": "FP16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenVino:
    """OpenVINO, tuned for the latency of one request.

    `precision` is float32 unless asked otherwise: left to itself OpenVINO computes in float16 on ARM and in bfloat16 on
    newer x86, and a table would compare that with the float32 of other runtimes.
    """

    name: ClassVar[str] = "openvino"

    precision: Precision = "float32"
    threads: int | None = None

    def __post_init__(self) -> None:
        expect_threads(self.threads)
        decode(Precision, self.precision, "The option precision")

    def environment(self, inputs: Inputs) -> Environment:
        self._expect_precision()
        return environment_of(
            inputs,
            device="cpu",
            runtime=spelled(self, without=("precision", "threads")),
            version=load("openvino", "openvino").get_version(),
            precision=self.precision,
            threads=self.threads,
        )

    def compile(self, module: nn.Module, inputs: Inputs) -> Compiled:
        module, inputs = in_float32(module, inputs)
        return self._request(self._model(module, inputs), inputs)

    def _request(self, model: Any, inputs: Inputs) -> Compiled:
        properties = {
            "INFERENCE_PRECISION_HINT": _HINTS[self.precision],
            "INFERENCE_NUM_THREADS": thread_count(self.threads),
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,
        }
        self._expect_precision()
        with reasons("OpenVINO rejects this module"):
            compiled = _core().compile_model(model, "CPU", properties)
            return _Request(compiled.create_infer_request(), inputs)

    def _expect_precision(self) -> None:
        """A CPU that cannot compute as asked does it otherwise, without a word."""
        able = _core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        if _CAPABILITIES[self.precision] not in able:
            others = [f"openvino:precision={name}" for name, capability in _CAPABILITIES.items() if capability in able]
            raise BackendError(
                f"OpenVINO cannot compute in {self.precision} on this CPU, and would take another precision. Ask for "
                f"one that it has: {' or '.join(others)}."
            )

    def export(self, module: nn.Module, inputs: Inputs, path: str | Path, *, dynamic_batch: bool = False) -> Path:
        """OpenVINO's own format: this file, and its weights beside it with the suffix .bin."""
        path = expect_suffix(path, ".xml")
        model = self._model(module, inputs, dynamic_batch)
        with reasons("OpenVINO cannot export this module"):
            load("openvino", "openvino").save_model(model, path, compress_to_fp16=False)
        return path

    def open(self, path: str | Path, inputs: Inputs) -> Compiled:
        core = _core()
        with reasons("OpenVINO cannot read this file"):
            model = core.read_model(expect_suffix(path, ".xml"))
        return self._request(model, inputs)

    def _model(self, module: nn.Module, inputs: Inputs, dynamic_batch: bool = False) -> Any:
        core = _core()
        model = onnx_bytes(module, inputs, extra="openvino", dynamic_batch=dynamic_batch)
        with reasons("OpenVINO cannot read this module"):
            return core.read_model(model)


@cache
def _core() -> Any:
    """One for the process: it loads OpenVINO's plugins, which takes longer than to compile a small network."""
    return load("openvino", "openvino").Core()


class _Request:
    """An inference request with its inputs in place."""

    __slots__ = ("_request",)

    def __init__(self, request: Any, inputs: Inputs) -> None:
        self._request = request
        tensor_of = load("openvino", "openvino").Tensor
        for n, tensor in enumerate(inputs):
            # A copy in OpenVINO's memory: the request must not read from a tensor that its owner changes.
            request.set_input_tensor(n, tensor_of(tensor.detach().cpu().contiguous().numpy().copy()))
        self()

    def __call__(self) -> Inputs:
        with reasons("OpenVINO cannot run this module"):
            self._request.infer()
            return tuple(torch.from_numpy(tensor.data.copy()) for tensor in self._request.output_tensors)

    def seconds(self) -> float:
        with reasons("OpenVINO cannot run this module"):
            start = time.perf_counter()
            self._request.infer()
            return time.perf_counter() - start

    def close(self) -> None:
        self._request = None
