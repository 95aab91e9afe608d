"""Where a training runs: the device, and which of several processes this is. accelerate knows both."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from depthfold.errors import DepthfoldError, InvalidValue
from depthfold.support.optional import load

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The device of this process, and the processes that train together: this one is `rank` of `world`."""

    device: torch.device
    rank: int = 0
    world: int = 1

    @property
    def main(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0

    def by_main(self, work: Callable[[], T]) -> T:
        """What the first process's work returns or raises, in all of them: nobody waits for one that has failed."""
        if self.world == 1:
            return work()
        outcome: list[Any] = [None, None]
        if self.main:
            try:
                outcome[0] = work()
            except DepthfoldError as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]  # type: ignore[no-any-return]

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Give all processes the tensors of the first one, in place."""
        if self.world == 1:
            return
        for tensor in tensors:
            whole = tensor.detach().contiguous()
            dist.broadcast(whole, src=0)
            tensor.detach().copy_(whole)

    def mean(self, values: Tensor) -> Tensor:
        """The mean over the processes."""
        if self.world > 1:
            dist.all_reduce(values)
            values /= self.world
        return values


def find_place(device: str | torch.device | None = None) -> Place:
    """This process's place. A device that is named is taken as it is, and this process trains alone on it."""
    if device is None:
        return _from_accelerate()
    try:
        return Place(device=_numbered(torch.device(device)))
    except (RuntimeError, TypeError, AssertionError) as error:
        raise InvalidValue(f'There is no device {device!r}: {error}. Name one such as "cpu" or "cuda:0".') from error


def _from_accelerate() -> Place:
    """accelerate keeps one state for the whole process, which the first to ask defines. A user who asks later (for
    the CPU, say) must find it as if we had never asked; so one that we made is taken back, unless it holds the
    connection to other processes."""
    state = load("accelerate.state", "train").PartialState
    return _read(state()) if state._shared_state else _own_reading()


@functools.cache  # with a GPU, accelerate starts a program each time
def _own_reading() -> Place:
    state = load("accelerate.state", "train").PartialState
    # `accelerate launch --cpu` says so in the environment, which PartialState does not read. Nor does it find the other
    # processes of `torchrun` on a machine without an accelerator, unless it is told that there is none.
    asked = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on", "y", "t")
    place = _read(state(cpu=asked or not torch.accelerator.is_available()))
    if place.world == 1:
        state._reset_state()
    return place


def _read(state: Any) -> Place:
    return Place(device=_numbered(state.device), rank=state.process_index, world=state.num_processes)


def _numbered(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
