"""OpenVINO on the CPU."""

from __future__ import annotations

import errno
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from depthfold.backends.base import Compiled, Inputs, backend_errors, check_suffix, check_threads, float32_copy
from depthfold.backends.machine import make_environment, thread_count
from depthfold.backends.onnx_writer import onnx_bytes
from depthfold.backends.registry import describe_target
from depthfold.core import Environment
from depthfold.errors import BackendError
from depthfold.support.document import decode
from depthfold.support.optional import load

Precision = Literal["float32", "bfloat16", "float16"]
HINTS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}  # values of INFERENCE_PRECISION_HINT
_CAPABILITIES = {"float32": "FP32", "bfloat16": "BF16", "float16": "FP16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenVino:
    """OpenVINO, configured for the latency of single requests.

    `precision` is float32 by default. OpenVINO's own default is float16 on ARM and bfloat16 on newer x86 CPUs, which
    would not be comparable with other runtimes.
    """

    name: ClassVar[str] = "openvino"

    precision: Precision = "float32"
    threads: int | None = None

    def __post_init__(self) -> None:
        check_threads(self.threads)
        decode(Precision, self.precision, "The option precision")

    def environment(self, inputs: Inputs) -> Environment:
        self._check_precision()
        return make_environment(
            inputs, device="cpu", runtime=describe_target(self, without=("precision", "threads")),
            version=load("openvino", "openvino").get_version(), precision=self.precision, threads=self.threads,
        )  # fmt: skip

    def compile(self, module: nn.Module, inputs: Inputs) -> Compiled:
        module, inputs = float32_copy(module, inputs)
        return self._request(self._model(module, inputs), inputs)

    def _request(self, model: Any, inputs: Inputs) -> Compiled:
        properties = {
            "INFERENCE_PRECISION_HINT": HINTS[self.precision],
            "INFERENCE_NUM_THREADS": thread_count(self.threads),
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,
        }
        self._check_precision()
        with backend_errors("OpenVINO rejects this module"):
            compiled = _core().compile_model(model, "CPU", properties)
            return _Request(compiled.create_infer_request(), inputs)

    def _check_precision(self) -> None:
        """Raise BackendError if the CPU does not support the precision, because OpenVINO would silently use another."""
        able = _core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        if _CAPABILITIES[self.precision] not in able:
            others = [f"openvino:precision={name}" for name, capability in _CAPABILITIES.items() if capability in able]
            raise BackendError(f"OpenVINO cannot compute in {self.precision} on this CPU. Use {' or '.join(others)}.")

    def export(self, module: nn.Module, inputs: Inputs, path: str | Path, *, dynamic_batch: bool = False) -> Path:
        """Write OpenVINO IR: this file, and the weights in a .bin file next to it."""
        path = check_suffix(path, ".xml")
        model = self._model(module, inputs, dynamic_batch)
        try:
            with backend_errors("OpenVINO cannot export this module"):
                load("openvino", "openvino").save_model(model, path, compress_to_fp16=False)
        except BackendError as error:
            if "iostream" not in str(error):
                raise
            # The stream of C++ does not know the reason, such as a full disk.
            raise OSError(errno.EIO, "OpenVINO could not write the whole file", str(path)) from error
        return path

    def open(self, path: str | Path, inputs: Inputs) -> Compiled:
        core = _core()
        with backend_errors("OpenVINO cannot read this file"):
            model = core.read_model(check_suffix(path, ".xml"))
        return self._request(model, inputs)

    def _model(self, module: nn.Module, inputs: Inputs, dynamic_batch: bool = False) -> Any:
        core = _core()
        model = onnx_bytes(module, inputs, extra="openvino", dynamic_batch=dynamic_batch)
        with backend_errors("OpenVINO cannot read this module"):
            return core.read_model(model)


@cache
def _core() -> Any:
    """Return the Core of this process. Loading its plugins takes longer than compiling a small network."""
    return load("openvino", "openvino").Core()


class _Request:
    """An inference request with its inputs set."""

    __slots__ = ("_request",)

    def __init__(self, request: Any, inputs: Inputs) -> None:
        self._request = request
        tensor_of = load("openvino", "openvino").Tensor
        for n, tensor in enumerate(inputs):
            # A copy, because the caller may modify the tensor later.
            request.set_input_tensor(n, tensor_of(tensor.detach().cpu().contiguous().numpy().copy()))
        self()

    def __call__(self) -> Inputs:
        with backend_errors("OpenVINO cannot run this module"):
            self._request.infer()
            return tuple(torch.from_numpy(tensor.data.copy()) for tensor in self._request.output_tensors)

    def seconds(self) -> float:
        with backend_errors("OpenVINO cannot run this module"):
            start = time.perf_counter()
            self._request.infer()
            return time.perf_counter() - start

    def close(self) -> None:
        self._request = None
