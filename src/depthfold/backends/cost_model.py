"""A backend that computes latencies with a formula instead of measuring them, for tests and dry runs.

    seconds = network + sum over convolutions of (launch + FLOPs / flops + bytes / bandwidth)

A multiplication with an addition counts as two FLOPs. The bytes are those of input, weight and output in float32, each
moved once. Other operations are free; the constant per network accounts for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from depthfold.backends.base import Compiled, Inputs, backend_errors, flatten, float32_copy, on_cpu
from depthfold.backends.machine import make_environment
from depthfold.backends.precision import disable_autocast
from depthfold.backends.registry import describe_target
from depthfold.core import Environment
from depthfold.errors import BackendError, InvalidValue

_CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """The costs of an imaginary machine. `noise` is the standard deviation of the logarithm of a sample."""

    name: ClassVar[str] = "cost_model"

    network_us: float = 100.0
    launch_us: float = 20.0
    gflops: float = 50.0  # 1e9 floating-point operations per second
    gbytes: float = 10.0  # 1e9 bytes per second
    noise: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for option in ("network_us", "launch_us", "noise"):
            if not (math.isfinite(value := getattr(self, option)) and value >= 0):
                raise InvalidValue(f"The option {option!r} of the cost model must be at least 0, found {value}.")
        for option in ("gflops", "gbytes"):
            if not (math.isfinite(value := getattr(self, option)) and value > 0):
                raise InvalidValue(f"The option {option!r} of the cost model must be above 0, found {value}.")

    def environment(self, inputs: Inputs) -> Environment:
        runtime = describe_target(self)
        name = "cost model"
        return make_environment(
            inputs, machine=name, device=name, runtime=runtime, version="1", precision="float32", threads=1
        )

    def compile(self, module: nn.Module, inputs: Inputs) -> Compiled:
        with backend_errors("PyTorch cannot run this module"), torch.inference_mode():
            module, inputs = float32_copy(module, inputs)
            with disable_autocast(inputs[0].device), Work() as work:
                flatten(module(*inputs))
        return _Computed(module, inputs, self.cost(work), self)

    def cost(self, work: Work) -> float:
        """Return the result of the formula in seconds."""
        constants = self.network_us + self.launch_us * work.launches
        return constants * 1e-6 + work.flops / (self.gflops * 1e9) + work.bytes / (self.gbytes * 1e9)

    def export(self, module: nn.Module, inputs: Inputs, path: str | Path) -> Path:
        raise BackendError("The cost model has no file format. Export with another backend, such as onnxruntime.")


class Work(TorchFunctionMode):
    """Counts the convolutions that run in its context, and their FLOPs and bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.launches, self.flops, self.bytes = 0, 0, 0

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _CONVOLUTIONS:
            source, weight = (*args, *(kwargs or {}).values())[:2]
            self.launches += 1
            self.flops += 2 * result.numel() * weight[0].numel()
            self.bytes += 4 * (source.numel() + weight.numel() + result.numel())
        return result


class _Computed:
    """Runs eagerly, and returns the computed duration."""

    computed: ClassVar[bool] = True
    __slots__ = ("_inputs", "_module", "_noise", "_random", "_seconds")

    def __init__(self, module: nn.Module, inputs: Inputs, seconds: float, model: CostModel) -> None:
        self._module, self._inputs, self._seconds, self._noise = module, inputs, seconds, model.noise
        self._random = Random(f"{model.seed} {seconds!r}")

    def __call__(self) -> Inputs:
        with torch.inference_mode(), disable_autocast(self._inputs[0].device):
            return tuple(on_cpu(tensor) for tensor in flatten(self._module(*self._inputs)))

    def seconds(self) -> float:
        return self._seconds * math.exp(self._noise * self._random.gauss()) if self._noise else self._seconds

    def close(self) -> None:
        self._module, self._inputs = nn.Identity(), ()
