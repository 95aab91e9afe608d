"""profile(): latency, FLOPs, parameters and peak memory of any network."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.utils.flop_counter import FlopCounterMode

from depthfold.backends import Backend, get
from depthfold.core import Profile
from depthfold.errors import BackendError
from depthfold.latency.memory import peak_memory
from depthfold.latency.timer import Timer, Turns
from depthfold.tracing.inputs import Inputs


def profile(module: nn.Module, example_inputs: Any, target: str | Backend, *, timer: Timer | None = None) -> Profile:
    """Measure a network on a target: any module, before or after folding."""
    return profile_all({"network": module}, example_inputs, target, timer=timer)["network"]


def profile_all(
    modules: Mapping[str, nn.Module], example_inputs: Any, target: str | Backend, *, timer: Timer | None = None
) -> dict[str, Profile]:
    """Measure several networks, timed in turns so that they can be compared."""
    backend, timer = get(target), timer or Timer(turns=8)
    inputs = tuple(Inputs.of(example_inputs).args)
    environment = backend.environment(inputs)
    turns: dict[str, Turns] = {}
    with contextlib.ExitStack() as stack:
        compiled = {
            name: stack.enter_context(contextlib.closing(backend.compile(module, inputs)))
            for name, module in modules.items()
        }
        timer.measure(compiled, turns, fail=_refuse)
    profiles = {}
    for name, module in modules.items():
        memory, reason = peak_memory(module, inputs, environment)
        profiles[name] = Profile(
            environment=environment,
            samples=tuple(sample for turn in turns[name] for sample in turn),
            flops=count_flops(module, inputs),
            parameters=sum(p.numel() for p in module.parameters()),
            depth=sum(isinstance(part, _ConvNd) for part in module.modules()),
            memory=memory,
            memory_reason=reason,
        )
    return profiles


def _refuse(name: str, error: BackendError) -> None:
    raise type(error)(f"The profile of {name!r} cannot be measured. {error}") from error


def count_flops(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> int:
    """By PyTorch's own counter, of one forward in evaluation mode on tensors without data."""
    counter = FlopCounterMode(display=False)
    shadow = copy.deepcopy(module).to("meta").eval()
    with counter, torch.no_grad():
        shadow(*(tensor.to("meta") for tensor in inputs))
    return int(counter.get_total_flops())
