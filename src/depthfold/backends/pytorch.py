"""Eager PyTorch, on the CPU or on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from depthfold.backends.base import Compiled, Inputs, dynamic_shapes, expect_suffix, private_copy, reasons
from depthfold.backends.machine import device_name
from depthfold.backends.torch_run import Device, Placed, Precision
from depthfold.errors import InvalidValue


@dataclass(frozen=True, slots=True, kw_only=True)
class PyTorch(Placed):
    """PyTorch as it is. On CUDA, float32 means that TF32 is off; tf32 that it is on."""

    name: ClassVar[str] = "pytorch"
    title: ClassVar[str] = "PyTorch"

    device: Device = "cpu"
    precision: Precision = "float32"
    channels_last: bool = False
    cuda_graphs: bool = False
    threads: int | None = None

    def __post_init__(self) -> None:
        self._place()

    def compile(self, module: nn.Module, inputs: Inputs) -> Compiled:
        place = self._place()
        with reasons("PyTorch cannot run this module"):
            module, inputs = place.moved(module, inputs)
        return self._run(place, lambda: module(*inputs))

    def export(self, module: nn.Module, inputs: Inputs, path: str | Path, *, dynamic_batch: bool = False) -> Path:
        """A program of torch.export, which `torch.export.load` reads."""
        path = expect_suffix(path, ".pt2")
        with reasons("PyTorch cannot export this module"):
            module, inputs = private_copy(module, inputs)
            shapes = dynamic_shapes(inputs) if dynamic_batch else None
            torch.export.save(torch.export.export(module, inputs, dynamic_shapes=shapes), path)
        return path

    def open(self, path: str | Path, inputs: Inputs) -> Compiled:
        """Device, types and layout of a program are those of its file, whatever they are with precision=float32; other
        options are refused where the file does not follow them."""
        path, place = expect_suffix(path, ".pt2"), self._place()
        device_name(self.device)  # raises where there is no such device
        with reasons("PyTorch cannot load this program"):
            program = torch.export.load(path).module()
        inputs = tuple(tensor.detach().to(self.device, copy=True) for tensor in inputs)
        if different := self._not_followed((*program.parameters(), *program.buffers(), *inputs)):
            raise InvalidValue(
                f"A program keeps what it was exported with: {path.name} {different}. Open it without that option, or "
                "export the network as you want it to run."
            )
        with reasons("PyTorch cannot run this module"), place.settings():
            forward = _on_inputs(program, inputs)
        return self._run(place, forward)

    def _not_followed(self, tensors: Inputs) -> str | None:
        """Which option is not that of these tensors, as the end of a sentence."""
        if self.channels_last:
            return "has its own layout, and channels_last=true cannot change it"
        for device in sorted({tensor.device.type for tensor in tensors} - {self.device}):
            return f"has tensors on the device {device}, not on device={self.device}"
        if self.precision in ("bfloat16", "float16"):
            types = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors if tensor.is_floating_point()}
            for other in sorted(types - {self.precision}):
                return f"computes in {other}, not in precision={self.precision}"
        return None


def _on_inputs(program: Callable[..., Any], inputs: Inputs) -> Callable[[], Any]:
    """A forward on the inputs where they are. Only a program that writes to them gets a copy every time: on what it
    left behind it would compute something else."""
    trial = tuple(tensor.clone() for tensor in inputs)
    program(*trial)
    if all(map(torch.equal, trial, inputs)):
        return lambda: program(*inputs)
    return lambda: program(*(tensor.clone() for tensor in inputs))
