"""What a training borrows, and gives back as it was: the model's modes, the teacher, random numbers, autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from depthfold.errors import InvalidValue
from depthfold.tracing import device_of

Seed = Callable[[int], None]


@contextlib.contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Every module of the model is put back into the mode, training or evaluation, in which it was found."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def placed(model: nn.Module, device: torch.device, channels_last: bool) -> Iterator[None]:
    """The model on the device, where it stays; in the memory format of the recipe, which it loses again, because a
    tensor that is not contiguous is refused by some of those who read weights."""
    model.to(device)
    found = (*model.parameters(), *model.buffers()) if channels_last else ()
    plain = [tensor for tensor in found if tensor.is_contiguous()]
    if channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    try:
        yield
    finally:
        for tensor in plain:
            tensor.data = tensor.data.contiguous()


@contextlib.contextmanager
def visiting(model: nn.Module, device: torch.device) -> Iterator[None]:
    """The model on the device; afterwards it is where it was."""
    home = device_of(model)
    try:
        model.to(device)
        yield
    finally:
        model.to(home)


@contextlib.contextmanager
def lent(
    teacher: nn.Module | None, student: nn.Module, device: torch.device
) -> Iterator[Callable[[Tensor], Tensor] | None]:
    """The teacher in evaluation mode, on the device, without gradients."""
    if teacher is None:
        yield None
        return
    _expect_teacher(teacher, student)

    def outputs(inputs: Tensor) -> Tensor:
        with torch.no_grad():
            return teacher(inputs)  # type: ignore[no-any-return]

    with modes_kept(teacher), visiting(teacher.eval(), device):
        yield outputs


@contextlib.contextmanager
def own_random_numbers(device: torch.device) -> Iterator[Seed]:
    """Inside, the global random numbers of the CPU and of the device are ours to seed; outside, nobody notices."""
    sources: list[tuple[Callable[[], Tensor], Callable[[Tensor], Any], Callable[[int], Any]]] = []
    for generator in _generators(device):
        sources.append((generator.get_state, generator.set_state, generator.manual_seed))
    if device.type == "mps":
        sources.append((torch.mps.get_rng_state, torch.mps.set_rng_state, torch.mps.manual_seed))
    states = [get() for get, _, _ in sources]

    def seed(number: int) -> None:
        for _, _, manual_seed in sources:
            manual_seed(number)

    try:
        yield seed
    finally:
        for (_, put, _), state in zip(sources, states, strict=True):
            put(state)


@contextlib.contextmanager
def own_precision(device: torch.device) -> Iterator[None]:
    """Inside, no autocast of the caller's is at work: the recipe says how a training computes, backwards as well as
    forwards, and scores are taken in the model's own precision. What the caller's has cast is forgotten, because
    weights may change inside."""
    with contextlib.ExitStack() as stack:
        # Only where there is one: an autocast of the task's own then stays the outermost, which forgets its casts by
        # itself when it ends.
        for kind in sorted({"cpu", device.type}):
            if torch.is_autocast_enabled(kind):
                stack.callback(torch.clear_autocast_cache)
                stack.enter_context(torch.autocast(kind, enabled=False))
                torch.clear_autocast_cache()
        yield


def _generators(device: torch.device) -> Iterator[torch.Generator]:
    yield torch.default_generator
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        yield torch.cuda.default_generators[device.index]


def _expect_teacher(teacher: nn.Module, student: nn.Module) -> None:
    if not isinstance(teacher, nn.Module):
        raise InvalidValue(f"The teacher must be an nn.Module, found {type(teacher).__name__}.")
    if {id(p) for p in teacher.parameters()} & {id(p) for p in student.parameters()}:
        raise InvalidValue(
            "The teacher shares parameters with the model that it teaches, and would change with it. Give a copy: "
            "copy.deepcopy(teacher)."
        )
