"""The device of a training run, and the processes that train together. accelerate determines both."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from depthfold.errors import DepthfoldError, InvalidValue
from depthfold.support.optional import load

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceContext:
    """The device of this process, its rank, and the number of processes that train together."""

    device: torch.device
    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        """True in the process that writes files."""
        return self.rank == 0

    def run_on_main(self, work: Callable[[], T]) -> T:
        """Run the function in the main process only, and return its result, or raise its error, in all processes."""
        if self.world_size == 1:
            return work()
        outcome: list[Any] = [None, None]
        if self.is_main:
            try:
                outcome[0] = work()
            except DepthfoldError as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]  # type: ignore[no-any-return]

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Copy the main process's tensors into those of all processes."""
        if self.world_size == 1:
            return
        _together(tensors, lambda flat: dist.broadcast(flat, src=0))

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over the processes."""
        if self.world_size > 1:
            dist.all_reduce(values)
            values /= self.world_size
        return values

    @torch.no_grad()
    def average_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Replace the gradients with their means over the processes. A parameter that no process used keeps none.

        DistributedDataParallel would only do this for a loss that calls the model, and nothing else of it. It would
        also need to know whether the loss leaves out parameters.
        """
        if self.world_size == 1:
            return
        used = torch.tensor([float(parameter.grad is not None) for parameter in parameters], device=self.device)
        chosen = [parameter for parameter, share in zip(parameters, self.mean(used).tolist(), strict=True) if share]
        for parameter in chosen:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        _together([each.grad for each in chosen if each.grad is not None], self.mean)


@torch.no_grad()
def _together(tensors: Iterable[Tensor], change: Callable[[Tensor], object]) -> None:
    """Change tensors in place as one tensor for each dtype and device, because each call between processes has a cost.

    The order is that of the tensors, so it is the same in all processes.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for group in groups.values():
        change(flat := torch.cat([tensor.reshape(-1) for tensor in group]))
        for tensor, part in zip(group, flat.split([each.numel() for each in group]), strict=True):  # type: ignore[no-untyped-call]
            tensor.copy_(part.view_as(tensor))


def device_context(device: str | torch.device | None = None) -> DeviceContext:
    """Return the context that accelerate determines, or that of a single process if a device is given."""
    if device is None:
        return _from_accelerate()
    try:
        return DeviceContext(device=_with_index(torch.device(device)))
    except (RuntimeError, TypeError, AssertionError) as error:
        raise InvalidValue(f'There is no device {device!r}: {error}. Use one such as "cpu" or "cuda:0".') from error


def _from_accelerate() -> DeviceContext:
    """Read accelerate's state without leaving one behind.

    accelerate keeps one state per process, which its first user configures. If depthfold creates it, it is removed
    again, so that the user can still configure it; a state that connects several processes is kept.
    """
    state = load("accelerate.state", "train").PartialState
    return _read(state()) if state._shared_state else _read_new_state()


@functools.cache  # with a GPU, accelerate starts a program each time
def _read_new_state() -> DeviceContext:
    state = load("accelerate.state", "train").PartialState
    # `accelerate launch --cpu` sets this variable, which PartialState does not read. And without cpu=True, PartialState
    # does not find the other processes of `torchrun` on a machine without an accelerator.
    cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on", "y", "t")
    context = _read(state(cpu=cpu or not torch.accelerator.is_available()))
    if context.world_size == 1:
        state._reset_state()
    return context


def _read(state: Any) -> DeviceContext:
    return DeviceContext(device=_with_index(state.device), rank=state.process_index, world_size=state.num_processes)


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
