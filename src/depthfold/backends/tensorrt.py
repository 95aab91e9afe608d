"""TensorRT, through ONNX. It uses PyTorch's memory, so it needs a PyTorch with CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from depthfold.backends.base import Compiled, Inputs, backend_errors, check_suffix, float32_copy
from depthfold.backends.machine import gpu_name, make_environment
from depthfold.backends.onnx_writer import onnx_bytes
from depthfold.backends.registry import describe_target
from depthfold.backends.torch_run import TorchOptions, TorchRun
from depthfold.core import Environment
from depthfold.errors import BackendError, InvalidValue, OutOfMemory
from depthfold.support.document import decode
from depthfold.support.optional import load

Precision = Literal["float32", "tf32", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRT:
    """TensorRT. TF32 is off with precision float32; with float16, TensorRT chooses the precision of each layer."""

    name: ClassVar[str] = "tensorrt"

    precision: Precision = "float32"
    optimisation: int = 3  # the builder's level, from 0 (fastest build) to 5 (longest search)

    def __post_init__(self) -> None:
        decode(Precision, self.precision, "The option precision")
        if not 0 <= self.optimisation <= 5:
            raise InvalidValue(f"The option 'optimisation' of TensorRT must be from 0 to 5, found {self.optimisation}.")

    def environment(self, inputs: Inputs) -> Environment:
        library = _tensorrt()
        return make_environment(
            inputs, device=gpu_name(), runtime=describe_target(self, without=("precision",)),
            version=library.__version__, precision=self.precision, threads=None,
        )  # fmt: skip

    def compile(self, module: nn.Module, inputs: Inputs) -> Compiled:
        library = _tensorrt()
        module, inputs = float32_copy(module, inputs)
        return self._run(library, self._engine(library, module, inputs), inputs)

    def _run(self, library: Any, engine: Any, inputs: Inputs) -> Compiled:
        options = TorchOptions(device="cuda", precision="float32", channels_last=False, threads=None)
        with backend_errors("TensorRT rejects this module"):
            engine = library.Runtime(library.Logger(library.Logger.ERROR)).deserialize_cuda_engine(engine)
            if engine is None:
                raise BackendError(
                    f"TensorRT {library.__version__} cannot load this engine, which was built by another version or "
                    "for another kind of GPU. Export it again on this machine."
                )
            return TorchRun(options, _Execution(library, engine, inputs), "TensorRT")

    def export(self, module: nn.Module, inputs: Inputs, path: str | Path, *, dynamic_batch: bool = False) -> Path:
        """Write a serialised engine, which runs only on this kind of GPU and with this version of TensorRT."""
        path = check_suffix(path, ".engine")
        if dynamic_batch:  # it would be slower than the engine that was measured
            raise BackendError("A TensorRT engine has a fixed batch size. Omit dynamic_batch, or export to ONNX.")
        path.write_bytes(bytes(self._engine(_tensorrt(), module, inputs)))
        return path

    def open(self, path: str | Path, inputs: Inputs) -> Compiled:
        library = _tensorrt()
        return self._run(library, check_suffix(path, ".engine").read_bytes(), inputs)

    def _engine(self, library: Any, module: nn.Module, inputs: Inputs) -> Any:
        model = onnx_bytes(module, inputs, extra="tensorrt")
        logger = library.Logger(library.Logger.ERROR)
        with backend_errors("TensorRT rejects this module"):
            builder = library.Builder(logger)
            network = builder.create_network(0)
            parser = library.OnnxParser(network, logger)
            if not parser.parse(model):
                problems = "; ".join(parser.get_error(n).desc() for n in range(parser.num_errors))
                raise BackendError(f"TensorRT cannot read this module: {problems}")
            config = builder.create_builder_config()
            config.builder_optimization_level = self.optimisation
            config.clear_flag(library.BuilderFlag.TF32)  # it is set by default
            if self.precision != "float32":
                config.set_flag(library.BuilderFlag.TF32)
            if self.precision == "float16":
                config.set_flag(library.BuilderFlag.FP16)
            engine = builder.build_serialized_network(network, config)
            if engine is None:
                raise BackendError("TensorRT could not build this module and gave no reason. Use another target.")
            return engine


def _tensorrt() -> Any:
    """Import TensorRT. Raise BackendError if there is no GPU."""
    library = load("tensorrt", "tensorrt")
    if not torch.cuda.is_available():
        raise BackendError(
            f"TensorRT needs an NVIDIA GPU, and PyTorch {torch.__version__} finds none. Install a driver and a PyTorch "
            "that was built with CUDA, or use another target, for example onnxruntime."
        )
    return library


class _Execution:
    """A forward of an engine on PyTorch's current stream. Inputs and outputs are PyTorch tensors."""

    def __init__(self, library: Any, engine: Any, inputs: Inputs) -> None:
        self._engine, self._context = engine, engine.create_execution_context()
        if self._context is None:
            raise OutOfMemory("TensorRT is out of memory: it could not create an execution context.")
        names = [engine.get_tensor_name(n) for n in range(engine.num_io_tensors)]
        sources = [name for name in names if engine.get_tensor_mode(name) == library.TensorIOMode.INPUT]
        self._tensors = {
            name: tensor.detach().to("cuda", copy=True).contiguous()
            for name, tensor in zip(sources, inputs, strict=True)
        }
        self._outputs = []
        for name in names:
            if name not in self._tensors:
                shape = tuple(engine.get_tensor_shape(name))
                self._tensors[name] = torch.empty(shape, dtype=_dtype(library, engine, name), device="cuda")
                self._outputs.append(self._tensors[name])
            self._context.set_tensor_address(name, self._tensors[name].data_ptr())

    def __call__(self) -> Inputs:
        if not self._context.execute_async_v3(torch.cuda.current_stream().cuda_stream):
            raise BackendError("TensorRT could not run this module and gave no reason. Use another target.")
        return tuple(self._outputs)


def _dtype(library: Any, engine: Any, name: str) -> torch.dtype:
    dtypes = {library.float32: torch.float32, library.float16: torch.float16, library.int32: torch.int32}
    found = engine.get_tensor_dtype(name)
    if found not in dtypes:
        raise BackendError(
            f"TensorRT returns an output of type {found}; expected float32, float16 or int32. Convert it in the module."
        )
    return dtypes[found]
