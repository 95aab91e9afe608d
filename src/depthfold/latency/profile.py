"""profile(): latency, FLOPs, parameters and peak memory of any network."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.utils.flop_counter import FlopCounterMode

from depthfold.backends import Backend, get
from depthfold.core import Document, Environment
from depthfold.core.describe import text_table
from depthfold.latency.memory import peak_memory
from depthfold.latency.timer import Timer, Turns
from depthfold.tracing.inputs import Inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile(Document):
    """What a network costs. `flops` counts a multiplication and an addition as two, as PyTorch's counter does; papers
    often print multiply-adds, which are half of it. `memory` is in bytes, weights included; None with the reason where
    it could not be measured."""

    FORMAT: ClassVar[str] = "depthfold.profile"

    environment: Environment
    samples: tuple[float, ...]
    flops: int
    parameters: int
    depth: int
    memory: int | None
    memory_reason: str | None = None

    @property
    def latency(self) -> float:
        """The median in milliseconds."""
        return median(self.samples)

    @property
    def spread(self) -> tuple[float, float]:
        """The middle half of the samples."""
        low, _, high = quantiles(self.samples, n=4, method="inclusive")
        return low, high

    def __str__(self) -> str:
        return side_by_side({"network": self})


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
        timer.measure(compiled, turns)
    profiles = {}
    for name, module in modules.items():
        memory, reason = peak_memory(module, inputs, environment.device or "cpu")
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


def count_flops(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> int:
    """By PyTorch's own counter, of one forward in evaluation mode on tensors without data."""
    counter = FlopCounterMode(display=False)
    shadow = copy.deepcopy(module).to("meta").eval()
    with counter, torch.no_grad():
        shadow(*(tensor.to("meta") for tensor in inputs))
    return int(counter.get_total_flops())


def side_by_side(profiles: Mapping[str, Profile]) -> str:
    """The profiles as a table, one column each, and how they compare with the first."""
    first = next(iter(profiles.values()))
    rows = [
        ("latency, ms", *(f"{p.latency:.4g}" for p in profiles.values())),
        ("middle half, ms", *(f"{p.spread[0]:.4g} to {p.spread[1]:.4g}" for p in profiles.values())),
        ("times as fast", *(f"{first.latency / p.latency:.2f}" for p in profiles.values())),
        ("multiply-adds, M", *(f"{p.flops / 2e6:.4g}" for p in profiles.values())),
        ("parameters, M", *(f"{p.parameters / 1e6:.4g}" for p in profiles.values())),
        ("peak memory, MB", *("?" if p.memory is None else f"{p.memory / 1e6:.4g}" for p in profiles.values())),
        ("convolutions", *(str(p.depth) for p in profiles.values())),
    ]
    return "\n".join([f"environment: {first.environment}", *text_table(("", *profiles), rows)])
