"""TorchInductor: torch.compile, on the CPU or on a CUDA device."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn

from depthfold.backends.base import Compiled, Inputs, reasons
from depthfold.backends.torch_run import Device, Placed, Precision
from depthfold.errors import BackendError, InvalidValue, MissingDependency
from depthfold.support.document import decode

Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
_WITH_GRAPHS = ("reduce-overhead", "max-autotune")  # modes that capture by themselves
# What PyTorch and Triton say where they find no compiler.
_NO_COMPILER = ("No working C++ compiler", "InvalidCxxCompiler", "TritonMissing", "working triton", "find C compiler")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inductor(Placed):
    """torch.compile with fixed sizes. `mode` is its own; reduce-overhead is with CUDA graphs of its own, which copy the
    inputs in every call. `cuda_graphs` captures what was compiled on inputs that stay where they are."""

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
            raise InvalidValue(f"mode={self.mode} makes CUDA graphs by itself. Leave out cuda_graphs, or the mode.")
        self._place()

    def inside(self) -> Self:
        return self if self.mode in _WITH_GRAPHS else Placed.inside(self)

    def compile(self, module: nn.Module, inputs: Inputs) -> Compiled:
        place = self._place()
        with reasons("TorchInductor cannot compile this module"):
            module, inputs = place.moved(module, inputs)
        compiled = torch.compile(_with_code_of_its_own(module), mode=self.mode, dynamic=False)
        try:
            return self._run(place, lambda: compiled(*inputs))
        except BackendError as error:
            if any(sign in str(error) or sign in repr(error.__cause__) for sign in _NO_COMPILER):
                needed = "a C++ compiler such as g++" if self.device == "cpu" else "Triton and a C compiler such as gcc"
                text = f"TorchInductor needs {needed}, and found none. Install it, or use the backend pytorch."
                raise MissingDependency(text) from error
            raise

    def export(self, module: nn.Module, inputs: Inputs, path: str | Path) -> Path:
        raise BackendError(
            "TorchInductor compiles in memory and has no file of its own. Export with the backend pytorch, and call "
            "torch.compile on what torch.export.load gives."
        )


def _with_code_of_its_own(module: nn.Module) -> Callable[..., Any]:
    """A function that runs the module and shares its code object with no other.

    torch.compile keeps what it compiled by code object and gives up after a few variants: it then runs eagerly, without
    a word. All modules of a class have one forward, so the ninth convolution of a table would not be compiled.
    """

    def forward(*inputs: Any) -> Any:
        return module(*inputs)

    own = forward.__code__.replace()
    return types.FunctionType(own, forward.__globals__, "forward", None, forward.__closure__)
