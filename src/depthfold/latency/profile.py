"""profile(): latency, FLOPs, parameters and peak memory of any network."""

from __future__ import annotations

import copy
import inspect
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils.flop_counter import FlopCounterMode

from depthfold.backends import Backend, Compiled, get
from depthfold.backends.base import in_float32, reasons
from depthfold.backends.torch_run import Place, Precision
from depthfold.core import Environment, Profile
from depthfold.errors import BackendError, DepthfoldError, InvalidValue, OutOfMemory
from depthfold.latency.candidates import held
from depthfold.latency.timer import Timer, Turns
from depthfold.support.text import one_line
from depthfold.tracing import ExampleInputs

# Peak memory of one forward: weights, activations and whatever the convolutions need besides.

RUNS = 3


def peak_memory(
    module: nn.Module, inputs: tuple[Tensor, ...], environment: Environment
) -> tuple[int | None, str | None]:
    """Bytes at the highest point of a forward in eager PyTorch, weights included; or None and the reason. On a GPU in
    the precision and layout of the environment, by CUDA's allocator; elsewhere in float32, by a process of its own."""
    try:
        # Where nothing has run on a GPU, it is not asked for its name either: that takes memory of a device that may be
        # in use by others, and fails where none is left.
        on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if on_cuda and environment.device == torch.cuda.get_device_name():
            return _on_cuda(_place(environment), module, inputs), None
        return _in_subprocess(*in_float32(module, inputs)), None
    except Exception as error:  # noqa: BLE001 - whatever it is, memory is not worth the rest of a profile
        return None, one_line(error)


def _place(environment: Environment) -> Place:
    """Where the network was timed, as far as eager PyTorch can follow; in float32 if it lacks the precision."""
    known: tuple[Precision, ...] = get_args(Precision)
    precision: Precision = next((each for each in known if each == environment.precision), "float32")
    last = "channels_last=true" in (environment.runtime or "")
    return Place(device="cuda", precision=precision, channels_last=last, threads=None)


def _on_cuda(place: Place, module: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    module, inputs = place.moved(module, inputs)
    torch.cuda.synchronize()
    others = torch.cuda.memory_allocated() - _bytes(module, inputs)
    with place.settings():
        module(*inputs)  # tries every algorithm for its convolutions, with memory that no later run needs
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(RUNS):
            module(*inputs)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - others


def _bytes(module: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    tensors = (*module.parameters(), *module.buffers(), *inputs)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _in_subprocess(module: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """The high-water mark of a process that does nothing else: an allocator on a CPU keeps no books."""
    module, inputs = module.cpu(), tuple(tensor.cpu() for tensor in inputs)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "module.pt2"
        with reasons("torch.export cannot export it for the process that measures it"):
            torch.export.save(torch.export.export(module, inputs), path)
        sizes = [[list(tensor.shape), str(tensor.dtype).split(".")[1]] for tensor in inputs]
        command = [sys.executable, "-m", "depthfold.latency.high_water", str(path), json.dumps(sizes)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        said = result.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise DepthfoldError(f"the process that measures it ended with code {result.returncode}: {said[0]}")
    return int(result.stdout.strip().splitlines()[-1]) + _bytes(module, inputs)


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
