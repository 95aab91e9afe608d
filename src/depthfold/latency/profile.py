"""profile(): latency, FLOPs, parameters and peak memory of any network."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils.flop_counter import FlopCounterMode

from depthfold.backends import Backend, Compiled, get
from depthfold.backends.base import in_float32, reasons
from depthfold.core import Profile
from depthfold.errors import BackendError, DepthfoldError, InvalidValue, OutOfMemory
from depthfold.latency.building import held
from depthfold.latency.memory import peak_memory
from depthfold.latency.timer import Timer, Turns
from depthfold.tracing import ExampleInputs


def profile(module: nn.Module, example_inputs: Any, target: str | Backend, *, timer: Timer | None = None) -> Profile:
    """Measure a network on a target: any module, before or after folding."""
    return profile_all({"network": module}, example_inputs, target, timer=timer)["network"]


def profile_all(
    modules: Mapping[str, nn.Module], example_inputs: Any, target: str | Backend, *, timer: Timer | None = None
) -> dict[str, Profile]:
    """Measure several networks, timed in turns so that they can be compared."""
    backend, timer = get(target), timer or Timer(turns=8)
    if not modules:
        raise InvalidValue("profile_all() needs one network at least, found none. Give a dict of modules by name.")
    given = {name: _in_order(module, ExampleInputs.of(example_inputs)) for name, module in modules.items()}
    environment = backend.environment(next(iter(given.values())))
    turns: dict[str, Turns] = {}
    flops: dict[str, int] = {}
    compiled: dict[str, Compiled] = {}

    def refuse(name: str, error: BackendError) -> None:
        hint = ""
        if isinstance(error, OutOfMemory) and len(modules) > 1:
            hint = " They are timed in turns, so all must fit together: profile each alone."
        said = str(error).removesuffix(".")
        raise type(error)(f"The profile of {name!r} cannot be measured. {said}.{hint}") from error

    with held(compiled):
        for name, module in modules.items():
            try:
                flops[name] = count_flops(module, given[name])
                with reasons("It cannot be built"):
                    compiled[name] = backend.compile(module, given[name])
            except BackendError as error:
                refuse(name, error)
        timer.measure(compiled, turns, fail=refuse)
    profiles = {}
    for name, module in modules.items():
        memory, reason = peak_memory(module, given[name], environment)
        profiles[name] = Profile(
            environment=environment,
            samples=tuple(sample for turn in turns[name] for sample in turn),
            flops=flops[name],
            parameters=sum(p.numel() for p in module.parameters()),
            depth=sum(isinstance(part, _ConvNd) for part in module.modules()),
            memory=memory,
            memory_reason=reason,
        )
    return profiles


def _in_order(module: nn.Module, given: ExampleInputs) -> tuple[Tensor, ...]:
    """The inputs by position, as runtimes take them; named ones are put in the order of the forward."""
    args, by_name = given.args, given.named
    if by_name:
        try:
            bound = inspect.signature(module.forward).bind(*args, **by_name)
        except TypeError as error:
            raise InvalidValue(
                f"The example inputs do not fit the forward of {type(module).__name__}: {error}. Name them as it does."
            ) from error
        args, by_name = bound.args, bound.kwargs
    if by_name:
        raise InvalidValue(
            f"The forward of {type(module).__name__} takes {', '.join(map(repr, by_name))} only by name, and a runtime "
            "takes its inputs in order, without gaps. Profile a module whose forward takes them so and calls this one."
        )
    if not args or not all(isinstance(value, Tensor) for value in args):
        found = ", ".join(type(value).__name__ for value in args) or "nothing"
        raise InvalidValue(f"A network is profiled on tensors, found {found}. Give them as its forward takes them.")
    return args


def count_flops(module: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """By PyTorch's own counter, of one forward in evaluation mode: on tensors without data, which takes no time, or on
    real ones where the forward looks at its data."""
    module, inputs = in_float32(module, inputs)
    for part in module.modules():
        if isinstance(part, _ConvNd):
            part.register_forward_pre_hook(_expect_batch)
    try:
        return _count(copy.deepcopy(module), inputs, "meta")
    except DepthfoldError:
        raise
    except Exception:  # noqa: BLE001 - a forward may raise anything on tensors without data
        with reasons("PyTorch cannot run this module"):
            return _count(module, inputs, "cpu")


def _count(module: nn.Module, inputs: tuple[Tensor, ...], device: str) -> int:
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        module.to(device)(*(tensor.to(device) for tensor in inputs))
    return int(counter.get_total_flops())


def _expect_batch(conv: nn.Module, args: tuple[Tensor, ...]) -> None:
    """A convolution also takes a single example, and everything after it would take its channels for a batch."""
    if isinstance(conv, _ConvNd) and args and args[0].dim() == len(conv.kernel_size) + 1:
        size = "x".join(map(str, args[0].shape))
        raise InvalidValue(
            f"A convolution receives a single example without a batch ({size}); latencies are those of a batch. Give "
            "a batch of one: x.unsqueeze(0)."
        )
