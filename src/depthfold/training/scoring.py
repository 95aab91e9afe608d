"""What computes the outputs of a model on a CUDA device: in the precision of the recipe, with fused kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from depthfold.kernels import fuse, fuse_eval
from depthfold.training.contexts import HALF, channels_last
from depthfold.training.recipe import Recipe
from depthfold.training.task import OutputTask, Task


@contextlib.contextmanager
def scorable(model: nn.Module, task: Task, recipe: Recipe, device: torch.device) -> Iterator[nn.Module]:
    """Yield the model to score, in evaluation mode, under the autocast to score it with.

    On CUDA, the precision and the memory format are those of the recipe, and an OutputTask gets a module with fused
    kernels if they apply. Other tasks get the model itself, because they may use its attributes. On other devices,
    nothing is changed.
    """
    if device.type != "cuda" or recipe.precision not in HALF:
        yield model
        return
    try:
        with (
            channels_last(model, enabled=recipe.channels_last),
            torch.autocast(device.type, dtype=HALF[recipe.precision]),
        ):
            yield with_kernels(model, recipe) if isinstance(task, OutputTask) else model
    finally:
        # The weights were cast without gradients, so a training step must not find them in the cache.
        torch.clear_autocast_cache()


def with_kernels(model: nn.Module, recipe: Recipe) -> nn.Module:
    """Return a module that computes the model with fused kernels, or the model itself if they do not apply."""
    if recipe.precision != "bfloat16" or not recipe.channels_last:
        return model
    return (fuse(model) if model.training else fuse_eval(model)) or model
