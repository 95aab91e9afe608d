"""Context managers that prepare a model and the process for a training run, and restore them afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from depthfold.backends import set_channels_last
from depthfold.errors import InvalidValue
from depthfold.tracing import device_of
from depthfold.training.recipe import Precision

HALF: dict[Precision, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@contextlib.contextmanager
def preserve_modes(model: nn.Module) -> Iterator[None]:
    """Restore the mode, training or evaluation, of every module on exit."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def channels_last(model: nn.Module, *, enabled: bool) -> Iterator[None]:
    """Keep the model in the memory format channels_last if enabled, and make its tensors contiguous again on exit."""
    if not enabled:
        yield
        return
    contiguous = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_contiguous()]
    set_channels_last(model)
    try:
        yield
    finally:
        for tensor in contiguous:
            tensor.data = tensor.data.contiguous()


@contextlib.contextmanager
def moved_to(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Move the model to the device, and back on exit."""
    before = device_of(model)
    try:
        model.to(device)
        yield
    finally:
        model.to(before)


@contextlib.contextmanager
def teacher_on(
    device: torch.device, teacher: nn.Module | None, student: nn.Module, *, in_channels_last: bool
) -> Iterator[None]:
    """Keep the teacher on the device, in evaluation mode and in the memory format of the student."""
    if teacher is None:
        yield
        return
    _check_teacher(teacher, student)
    with (
        preserve_modes(teacher),
        moved_to(teacher.eval(), device),
        channels_last(teacher, enabled=in_channels_last),
    ):
        yield


def outputs_of(teacher: nn.Module | None) -> Callable[..., Any] | None:
    """Return a function that runs the teacher without gradients. It is called as the model is."""
    if teacher is None:
        return None

    def outputs(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return teacher(*args, **kwargs)

    return outputs


def _check_teacher(teacher: nn.Module, student: nn.Module) -> None:
    if not isinstance(teacher, nn.Module):
        raise InvalidValue(f"The teacher must be an nn.Module, found {type(teacher).__name__}.")
    if {id(p) for p in teacher.parameters()} & {id(p) for p in student.parameters()}:
        raise InvalidValue(
            "The teacher shares parameters with the model that it teaches, so training would change it. Pass a copy: "
            "copy.deepcopy(teacher)."
        )
