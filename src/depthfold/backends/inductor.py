"""TorchInductor: torch.compile, on the CPU or on a CUDA device."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn

from depthfold.backends.base import Compiled, Inputs, backend_errors
from depthfold.backends.torch_run import Device, Precision, TorchBackend
from depthfold.errors import BackendError, InvalidValue, MissingDependency
from depthfold.support.document import decode

Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
_WITH_GRAPHS = ("reduce-overhead", "max-autotune")  # modes that use CUDA graphs
# In the errors of PyTorch and Triton if they find no compiler.
_NO_COMPILER = ("No working C++ compiler", "InvalidCxxCompiler", "TritonMissing", "working triton", "find C compiler")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inductor(TorchBackend):
    """torch.compile with static shapes. `mode` is passed to torch.compile.

    The modes reduce-overhead and max-autotune use CUDA graphs that copy the inputs in every call. `cuda_graphs` records
    a graph that reads the inputs in place.
    """

    name: ClassVar[str] = "inductor"
    title: ClassVar[str] = "TorchInductor"

    device: Device = "cpu"
    precision: Precision = "float32"
    mode: Mode = "default"
    channels_last: bool = False
    cuda_graphs: bool = False
    threads: int | None = None

    def __post_init__(self) -> None:
        decode(Mode, self.mode, "The option mode")
        if self.cuda_graphs and self.mode in _WITH_GRAPHS:
            raise InvalidValue(f"mode={self.mode} already uses CUDA graphs. Omit cuda_graphs, or the mode.")
        self._options()

    def inside(self) -> Self:
        return self if self.mode in _WITH_GRAPHS else TorchBackend.inside(self)

    def compile(self, module: nn.Module, inputs: Inputs) -> Compiled:
        options = self._options()
        with backend_errors("TorchInductor cannot compile this module"):
            module, inputs = options.moved(module, inputs)
        compiled = torch.compile(_unique_forward(module), mode=self.mode, dynamic=False)
        try:
            return self._run(options, lambda: compiled(*inputs))
        except BackendError as error:
            if any(sign in str(error) or sign in repr(error.__cause__) for sign in _NO_COMPILER):
                needed = "a C++ compiler such as g++" if self.device == "cpu" else "Triton and a C compiler such as gcc"
                text = f"TorchInductor needs {needed}. Install it, or use the backend pytorch."
                raise MissingDependency(text) from error
            raise

    def export(self, module: nn.Module, inputs: Inputs, path: str | Path) -> Path:
        raise BackendError(
            "TorchInductor has no file format. Export with the backend pytorch, and call torch.compile on the result "
            "of torch.export.load."
        )


def _unique_forward(module: nn.Module) -> Callable[..., Any]:
    """Return a function that runs the module and has its own code object.

    torch.compile caches by code object, and silently runs eagerly after a few variants. All modules of a class share
    the code of their forward, so the ninth convolution of a table would not be compiled.
    """

    def forward(*inputs: Any) -> Any:
        return module(*inputs)

    own = forward.__code__.replace()
    return types.FunctionType(own, forward.__globals__, "forward", None, forward.__closure__)
