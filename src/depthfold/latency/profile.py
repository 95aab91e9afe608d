"""profile(): latency, FLOPs, parameters and peak memory of any network."""

from __future__ import annotations

import copy
import inspect
import json
import os
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

from depthfold.backends import Backend, Compiled, backend_errors, disable_autocast, float32_copy, get
from depthfold.backends.base import quiet
from depthfold.backends.torch_run import Precision, TorchOptions, exported_program
from depthfold.core import Environment, Profile
from depthfold.core.speedup import quartiles
from depthfold.errors import BackendError, DepthfoldError, InvalidValue, OutOfMemory
from depthfold.latency.candidates import closing_all
from depthfold.latency.timer import Rounds, Timer
from depthfold.progress import Progress, silent
from depthfold.support.text import one_line
from depthfold.tracing import ExampleInputs

RUNS = 3  # after the first


def profile(module: nn.Module, example_inputs: Any, target: str | Backend, *, timer: Timer | None = None) -> Profile:
    """Measure any module on a target."""
    return profile_all({"network": module}, example_inputs, target, timer=timer)["network"]


def profile_all(
    modules: Mapping[str, nn.Module],
    example_inputs: Any,
    target: str | Backend,
    *,
    timer: Timer | None = None,
    progress: Progress = silent,
) -> dict[str, Profile]:
    """Measure several networks, timed in the same rounds so that they are comparable."""
    backend, timer = get(target), timer or Timer(rounds=8)
    if not modules:
        raise InvalidValue("profile_all() needs at least one network. Give a dict of modules by name.")
    given = {name: _in_order(module, ExampleInputs.of(example_inputs)) for name, module in modules.items()}
    environment = backend.environment(next(iter(given.values())))
    rounds: dict[str, Rounds] = {}
    flops: dict[str, int] = {}
    compiled: dict[str, Compiled] = {}

    def refuse(name: str, error: BackendError) -> None:
        hint = ""
        if isinstance(error, OutOfMemory) and len(modules) > 1:
            hint = " All networks must fit into memory together; otherwise profile each alone."
        reason = str(error).removesuffix(".")
        raise type(error)(f"The profile of {name!r} cannot be measured. {reason}.{hint}") from error

    tick = progress("latency and memory", 1 + len(modules), 0)
    with closing_all(compiled):
        for name, module in modules.items():
            try:
                flops[name] = count_flops(module, given[name])
                with backend_errors("It cannot be built"):
                    compiled[name] = backend.compile(module, given[name])
            except BackendError as error:
                refuse(name, error)
        timer.measure(compiled, rounds, fail=refuse)
    tick()
    profiles = {}
    for name, module in modules.items():
        memory, reason = peak_memory(module, given[name], environment)
        profiles[name] = Profile(
            environment=environment, quartiles=quartiles([sample for samples in rounds[name] for sample in samples]),
            count=sum(map(len, rounds[name])), flops=flops[name],
            parameters=sum(p.numel() for p in module.parameters()),
            depth=sum(isinstance(part, _ConvNd) for part in module.modules()), memory=memory, memory_reason=reason,
        )  # fmt: skip
        tick()
    return profiles


def _in_order(module: nn.Module, given: ExampleInputs) -> tuple[Tensor, ...]:
    """Return the inputs by position, because runtimes take no names. Named ones get the order of the forward."""
    args, by_name = given.args, given.named
    if by_name:
        try:
            bound = inspect.signature(module.forward).bind(*args, **by_name)
        except TypeError as error:
            raise InvalidValue(
                f"The example inputs do not fit the forward of {type(module).__name__}: {error}. Use its names."
            ) from error
        args, by_name = bound.args, bound.kwargs
    if by_name:
        raise InvalidValue(
            f"The forward of {type(module).__name__} takes {', '.join(map(repr, by_name))} only by name, but a "
            "runtime takes inputs by position. Profile a wrapper whose forward takes them by position."
        )
    if not args or not all(isinstance(value, Tensor) for value in args):
        found = ", ".join(type(value).__name__ for value in args) or "nothing"
        raise InvalidValue(f"The example inputs of a profile must be tensors, found {found}.")
    return args


def count_flops(module: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """Return the FLOPs of one forward in evaluation mode, from PyTorch's counter.

    Use tensors on the meta device, which takes no time, or real ones if the forward depends on its data.
    """
    module, inputs = float32_copy(module, inputs)
    for part in module.modules():
        if isinstance(part, _ConvNd):
            part.register_forward_pre_hook(_check_batch)
    try:
        return _count(copy.deepcopy(module), inputs, "meta")
    except DepthfoldError:
        raise
    except Exception:  # noqa: BLE001 - a forward may raise anything on meta tensors
        with backend_errors("PyTorch cannot run this module"):
            return _count(module, inputs, "cpu")


def _count(module: nn.Module, inputs: tuple[Tensor, ...], device: str) -> int:
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad(), disable_autocast(torch.device("cpu")):
        module.to(device)(*(tensor.to(device) for tensor in inputs))
    return int(counter.get_total_flops())


def _check_batch(conv: nn.Module, args: tuple[Tensor, ...]) -> None:
    """Raise InvalidValue for an input without a batch dimension. A convolution would accept it."""
    if isinstance(conv, _ConvNd) and args and args[0].dim() == len(conv.kernel_size) + 1:
        size = "x".join(map(str, args[0].shape))
        raise InvalidValue(
            f"A convolution receives a single example without a batch dimension ({size}). Give a batch of one: "
            "x.unsqueeze(0)."
        )


def peak_memory(
    module: nn.Module, inputs: tuple[Tensor, ...], environment: Environment
) -> tuple[int | None, str | None]:
    """Return the peak memory of a forward in eager PyTorch in bytes, weights included; or None and the reason.

    On a GPU it is measured with CUDA's allocator, in the precision and layout of the environment; elsewhere in a new
    process, in float32.
    """
    try:
        # If nothing has run on a GPU yet, do not ask for its name: that would allocate memory on the GPU.
        on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if on_cuda and environment.device == torch.cuda.get_device_name():
            return _on_cuda(_cuda_options(environment), module, inputs), None
        return _in_subprocess(*float32_copy(module, inputs)), None
    except Exception as error:  # noqa: BLE001 - no failure here may end a profile
        return None, one_line(error)


def _cuda_options(environment: Environment) -> TorchOptions:
    """Return the options for eager PyTorch that match the environment: float32 if it has no such precision."""
    known: tuple[Precision, ...] = get_args(Precision)
    precision: Precision = next((each for each in known if each == environment.precision), "float32")
    last = "channels_last=true" in (environment.runtime or "")
    return TorchOptions(device="cuda", precision=precision, channels_last=last, threads=None)


def _on_cuda(options: TorchOptions, module: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    module, inputs = options.moved(module, inputs)
    torch.cuda.synchronize()
    others = torch.cuda.memory_allocated() - _bytes(module, inputs)
    with options.settings():
        module(*inputs)  # the first run tries every convolution algorithm, which takes extra memory
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(RUNS):
            module(*inputs)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - others


def _bytes(module: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    tensors = (*module.parameters(), *module.buffers(), *inputs)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# glibc would raise this threshold, 128 KiB, whenever a larger block is freed. Blocks below it stay in the process, and
# the peak would contain feature maps that were freed.
_RETURN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(128 * 1024)}


def _in_subprocess(module: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """Return the peak memory of a process that only runs the module: PyTorch's CPU allocator has no statistics."""
    module, inputs = module.cpu(), tuple(tensor.cpu() for tensor in inputs)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "module.pt2"
        with backend_errors("torch.export cannot export it for the process that measures it"), quiet():
            path.write_bytes(exported_program(module, inputs))
        sizes = [[list(tensor.shape), str(tensor.dtype).split(".")[1]] for tensor in inputs]
        command = [sys.executable, "-m", "depthfold.latency.high_water", str(path), json.dumps(sizes)]
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | _RETURN_MEMORY)
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines()[-1:] or ["no message"]
        raise DepthfoldError(f"the process that measures it ended with code {result.returncode}: {lines[0]}")
    return int(result.stdout.strip().splitlines()[-1]) + _bytes(module, inputs)
