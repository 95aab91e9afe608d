"""ONNX Runtime, on the CPU or with its CUDA and TensorRT providers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from depthfold.backends.base import Compiled, Inputs, backend_errors, check_suffix, check_threads, float32_copy
from depthfold.backends.machine import gpu_name, make_environment, thread_count
from depthfold.backends.onnx_writer import onnx_bytes
from depthfold.backends.registry import describe_target
from depthfold.core import Environment
from depthfold.errors import BackendError, InvalidValue
from depthfold.support.document import decode
from depthfold.support.optional import load

_CPU, _CUDA, _TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"
_LEVELS = {"none": "DISABLE_ALL", "basic": "ENABLE_BASIC", "extended": "ENABLE_EXTENDED", "all": "ENABLE_ALL"}
Precision = Literal["float32", "tf32", "float16"]
Level = Literal["none", "basic", "extended", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxRuntime:
    """ONNX Runtime with `providers` in order of preference.

    On CUDA, TF32 is off with precision float32 and on with tf32.
    """

    name: ClassVar[str] = "onnxruntime"

    providers: tuple[str, ...] = (_CPU,)
    precision: Precision = "float32"
    optimisation: Level = "all"
    threads: int | None = None

    def __post_init__(self) -> None:
        check_threads(self.threads)
        decode(Precision, self.precision, "The option precision")
        decode(Level, self.optimisation, "The option optimisation")
        if not self.providers:
            raise InvalidValue(f"ONNX Runtime needs at least one provider, such as {_CPU}.")
        if self.precision != "float32" and not self._on_gpu:
            raise InvalidValue(
                f"ONNX Runtime's {_CPU} computes in float32, not in {self.precision}. Use precision=float32."
            )
        if self.precision == "float32" and _TENSORRT in self.providers:
            raise InvalidValue(f"The {_TENSORRT} always allows TF32: use precision=tf32 or precision=float16.")

    @property
    def _on_gpu(self) -> bool:
        return _CUDA in self.providers or _TENSORRT in self.providers

    def environment(self, inputs: Inputs) -> Environment:
        return make_environment(
            inputs, device=gpu_name() if self._on_gpu else "cpu",
            runtime=describe_target(self, without=("precision", "threads")),
            version=load("onnxruntime", "onnx").__version__, precision=self.precision, threads=self.threads,
        )  # fmt: skip

    def compile(self, module: nn.Module, inputs: Inputs) -> Compiled:
        library = load("onnxruntime", "onnx")
        self._check_providers(library)
        module, inputs = float32_copy(module, inputs)
        if self.precision == "float16":
            module, inputs = module.half(), tuple(t.half() if t.is_floating_point() else t for t in inputs)
        return self._session(library, onnx_bytes(module, inputs), inputs)

    def _session(self, library: Any, model: bytes, inputs: Inputs) -> Compiled:
        with backend_errors("ONNX Runtime rejects this module"):
            session = library.InferenceSession(model, self._session_options(library), providers=self._with_options())
            if self.providers[0] not in session.get_providers():  # it silently falls back to the CPU
                raise BackendError(f"ONNX Runtime could not start its {self.providers[0]}. Check its driver.")
            return _Session(library, session, inputs, "cuda" if self._on_gpu else "cpu")

    def _check_providers(self, library: Any) -> None:
        present = library.get_available_providers()
        for provider in self.providers:
            if provider not in present:
                raise BackendError(
                    f"This ONNX Runtime has no {provider}; it has {', '.join(present)}. For the GPU providers, run: "
                    "pip install onnxruntime-gpu"
                )

    def _session_options(self, library: Any) -> Any:
        options = library.SessionOptions()
        options.intra_op_num_threads = thread_count(self.threads)
        options.inter_op_num_threads = 1
        options.graph_optimization_level = getattr(library.GraphOptimizationLevel, f"ORT_{_LEVELS[self.optimisation]}")
        options.log_severity_level = 4  # errors are raised; warnings are not shown
        # Otherwise threads keep spinning after a run and slow down the next measurement.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        return options

    def _with_options(self) -> list[Any]:
        """Return the providers with their options. TensorRT needs permission to compute in float16."""
        options = {
            _CUDA: {"use_tf32": "0" if self.precision == "float32" else "1"},
            _TENSORRT: {"trt_fp16_enable": "True" if self.precision == "float16" else "False"},  # exactly this text
        }
        return [(provider, options[provider]) if provider in options else provider for provider in self.providers]

    def export(self, module: nn.Module, inputs: Inputs, path: str | Path, *, dynamic_batch: bool = False) -> Path:
        path = check_suffix(path, ".onnx")
        path.write_bytes(onnx_bytes(module, inputs, dynamic_batch=dynamic_batch))
        return path

    def open(self, path: str | Path, inputs: Inputs) -> Compiled:
        library = load("onnxruntime", "onnx")
        self._check_providers(library)
        return self._session(library, check_suffix(path, ".onnx").read_bytes(), inputs)


class _Session:
    """A session whose inputs and outputs are bound to memory of the device."""

    __slots__ = ("_binding", "_session", "_values")

    def __init__(self, library: Any, session: Any, inputs: Inputs, device: str) -> None:
        self._session, self._binding = session, session.io_binding()
        # On a CPU, a value uses the memory of its array. A binding before version 1.30 does not keep its values alive,
        # so they are kept here.
        self._values = [library.OrtValue.ortvalue_from_numpy(_array(tensor), device, 0) for tensor in inputs]
        for info, value in zip(session.get_inputs(), self._values, strict=True):
            self._binding.bind_ortvalue_input(info.name, value)
        for info in session.get_outputs():
            self._binding.bind_output(info.name, device)
        self()

    def __call__(self) -> Inputs:
        with backend_errors("ONNX Runtime cannot run this module"):
            self._session.run_with_iobinding(self._binding)
            outputs = [torch.from_numpy(array) for array in self._binding.copy_outputs_to_cpu()]
            return tuple(t.float() if t.dtype == torch.float16 else t for t in outputs)

    def seconds(self) -> float:
        with backend_errors("ONNX Runtime cannot run this module"):
            start = time.perf_counter()
            self._session.run_with_iobinding(self._binding)  # waits for the device
            return time.perf_counter() - start

    def close(self) -> None:
        self._session = self._binding = None
        self._values = []  # after the binding, which reads them


def _array(tensor: Tensor) -> Any:
    """Return a copy, because the caller may modify the tensor later."""
    return tensor.detach().cpu().contiguous().numpy().copy()
