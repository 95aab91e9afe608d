"""TensorRT, through ONNX. Its memory is PyTorch's, so it needs a PyTorch with CUDA beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from depthfold.backends.base import Compiled, Inputs, expect_suffix, in_float32, reasons
from depthfold.backends.machine import environment_of, gpu_name
from depthfold.backends.onnx_writer import onnx_bytes
from depthfold.backends.registry import spelled
from depthfold.backends.torch_run import Place, TorchRun
from depthfold.core import Environment
from depthfold.errors import BackendError, InvalidValue, OutOfMemory
from depthfold.support.document import decode
from depthfold.support.optional import load

Precision = Literal["float32", "tf32", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRT:
    """TensorRT. float32 means that TF32 is off; float16 that each layer may choose it."""

    name: ClassVar[str] = "tensorrt"

    precision: Precision = "float32"
    optimisation: int = 3  # the builder's level: 0 builds fastest, 5 searches longest

    def __post_init__(self) -> None:
        decode(Precision, self.precision, "The option precision")
        if not 0 <= self.optimisation <= 5:
            raise InvalidValue(f"The option 'optimisation' of TensorRT goes from 0 to 5, found {self.optimisation}.")

    def environment(self, inputs: Inputs) -> Environment:
        library = _ready()
        return environment_of(
            inputs,
            device=gpu_name(),
            runtime=spelled(self, without=("precision",)),
            version=library.__version__,
            precision=self.precision,
            threads=None,
        )

    def compile(self, module: nn.Module, inputs: Inputs) -> Compiled:
        library = _ready()
        module, inputs = in_float32(module, inputs)
        return self._run(library, self._engine(library, module, inputs), inputs)

    def _run(self, library: Any, engine: Any, inputs: Inputs) -> Compiled:
        place = Place(device="cuda", precision="float32", channels_last=False, threads=None)
        with reasons("TensorRT rejects this module"):
            engine = library.Runtime(library.Logger(library.Logger.ERROR)).deserialize_cuda_engine(engine)
            if engine is None:
                raise BackendError(
                    f"TensorRT {library.__version__} cannot load this engine: another version built it, or another "
                    "kind of GPU. Export it again on this machine."
                )
            return TorchRun(place, _Execution(library, engine, inputs), "TensorRT")

    def export(self, module: nn.Module, inputs: Inputs, path: str | Path, *, dynamic_batch: bool = False) -> Path:
        """A serialised engine, which runs on this kind of GPU and this version of TensorRT only."""
        path = expect_suffix(path, ".engine")
        if dynamic_batch:  # it would be tuned for no batch in particular, and slower than what was measured
            raise BackendError(
                "A TensorRT engine is built for one size of the batch. Leave out dynamic_batch, or export to ONNX."
            )
        path.write_bytes(bytes(self._engine(_ready(), module, inputs)))
        return path

    def open(self, path: str | Path, inputs: Inputs) -> Compiled:
        library = _ready()
        return self._run(library, expect_suffix(path, ".engine").read_bytes(), inputs)

    def _engine(self, library: Any, module: nn.Module, inputs: Inputs) -> Any:
        model = onnx_bytes(module, inputs, extra="tensorrt")
        logger = library.Logger(library.Logger.ERROR)
        with reasons("TensorRT rejects this module"):
            builder = library.Builder(logger)
            network = builder.create_network(0)
            parser = library.OnnxParser(network, logger)
            if not parser.parse(model):
                problems = "; ".join(parser.get_error(n).desc() for n in range(parser.num_errors))
                raise BackendError(f"TensorRT cannot read this module: {problems}")
            config = builder.create_builder_config()
            config.builder_optimization_level = self.optimisation
            config.clear_flag(library.BuilderFlag.TF32)  # it is set when nobody asks
            if self.precision != "float32":
                config.set_flag(library.BuilderFlag.TF32)
            if self.precision == "float16":
                config.set_flag(library.BuilderFlag.FP16)
            engine = builder.build_serialized_network(network, config)
            if engine is None:
                raise BackendError("TensorRT found no way to build this module, and says no more.")
            return engine


def _ready() -> Any:
    """The library, where there is a GPU for it to run on."""
    library = load("tensorrt", "tensorrt")
    if not torch.cuda.is_available():
        raise BackendError(
            "TensorRT needs an NVIDIA GPU, and PyTorch finds none on this machine. Run it where there is one, with a "
            f"driver and a PyTorch that was built with CUDA (this one is {torch.__version__}), or name another target: "
            "onnxruntime, for example."
        )
    return library


class _Execution:
    """One forward of an engine, on PyTorch's current stream. Inputs and outputs are tensors of PyTorch's."""

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
                self._tensors[name] = torch.empty(shape, dtype=_type(library, engine, name), device="cuda")
                self._outputs.append(self._tensors[name])
            self._context.set_tensor_address(name, self._tensors[name].data_ptr())

    def __call__(self) -> Inputs:
        if not self._context.execute_async_v3(torch.cuda.current_stream().cuda_stream):
            raise BackendError("TensorRT could not run this module, and says no more.")
        return tuple(self._outputs)


def _type(library: Any, engine: Any, name: str) -> torch.dtype:
    kinds = {library.float32: torch.float32, library.float16: torch.float16, library.int32: torch.int32}
    found = engine.get_tensor_dtype(name)
    if found not in kinds:
        raise BackendError(
            f"TensorRT gives an output of type {found}; expected float32, float16 or int32. Let the module convert it."
        )
    return kinds[found]
