"""Eager PyTorch, on the CPU or on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from depthfold.backends.base import Compiled, Inputs, backend_errors, check_suffix, dynamic_shapes, private_copy, quiet
from depthfold.backends.machine import device_name
from depthfold.backends.torch_run import Device, Precision, TorchBackend, exported_program
from depthfold.errors import InvalidValue


@dataclass(frozen=True, slots=True, kw_only=True)
class PyTorch(TorchBackend):
    """Eager PyTorch. On CUDA, TF32 is off with precision float32 and on with tf32."""

    name: ClassVar[str] = "pytorch"
    title: ClassVar[str] = "PyTorch"

    device: Device = "cpu"
    precision: Precision = "float32"
    channels_last: bool = False
    cuda_graphs: bool = False
    threads: int | None = None

    def __post_init__(self) -> None:
        self._options()

    def compile(self, module: nn.Module, inputs: Inputs) -> Compiled:
        options = self._options()
        with backend_errors("PyTorch cannot run this module"):
            module, inputs = options.moved(module, inputs)
        return self._run(options, lambda: module(*inputs))

    def export(self, module: nn.Module, inputs: Inputs, path: str | Path, *, dynamic_batch: bool = False) -> Path:
        """Write a program of torch.export, which `torch.export.load` reads."""
        path = check_suffix(path, ".pt2")
        with backend_errors("PyTorch cannot export this module"), quiet():
            module, inputs = private_copy(module, inputs)
            shapes = dynamic_shapes(inputs) if dynamic_batch else None
            program = exported_program(module, inputs, shapes)
        path.write_bytes(program)
        return path

    def open(self, path: str | Path, inputs: Inputs) -> Compiled:
        """Load a program. Its device, dtypes and layout are those of the file; options that contradict them are
        refused.

        Only precision=float32, the default, is accepted for a file of any precision.
        """
        path, options = check_suffix(path, ".pt2"), self._options()
        device_name(self.device)  # raises if there is no such device
        with backend_errors("PyTorch cannot load this program"), quiet():
            program = torch.export.load(path).module()
        inputs = tuple(tensor.detach().to(self.device, copy=True) for tensor in inputs)
        if conflict := self._conflict((*program.parameters(), *program.buffers(), *inputs)):
            raise InvalidValue(
                f"{path.name} {conflict}, and a program cannot be changed after its export. Omit that option, or "
                "export the network again."
            )
        with backend_errors("PyTorch cannot run this module"), options.settings():
            forward = _forward_on(program, inputs)
        return self._run(options, forward)

    def _conflict(self, tensors: Inputs) -> str | None:
        """Return how these tensors contradict the options, as the end of a sentence."""
        if self.channels_last:
            return "has a fixed memory format, not channels_last=true"
        for device in sorted({tensor.device.type for tensor in tensors} - {self.device}):
            return f"has tensors on the device {device}, not on device={self.device}"
        if self.precision in ("bfloat16", "float16"):
            types = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors if tensor.is_floating_point()}
            for other in sorted(types - {self.precision}):
                return f"computes in {other}, not in precision={self.precision}"
        return None


def _forward_on(program: Callable[..., Any], inputs: Inputs) -> Callable[[], Any]:
    """Return a call of the program on these inputs. They are copied for each call only if the program modifies them."""
    trial = tuple(tensor.clone() for tensor in inputs)
    program(*trial)
    if all(map(torch.equal, trial, inputs)):
        return lambda: program(*inputs)
    return lambda: program(*(tensor.clone() for tensor in inputs))
