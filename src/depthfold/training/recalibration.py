"""recalibrate(): estimate the statistics of batch norms again, after the layers before them have changed."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from depthfold.backends import disable_autocast
from depthfold.errors import InvalidValue
from depthfold.tracing import device_of, fork_rng
from depthfold.tracing.functional import FunctionalNorm
from depthfold.training.contexts import channels_last, preserve_modes
from depthfold.training.recipe import Recipe
from depthfold.training.task import Step, Task, derive_seed


def recalibrate(model: nn.Module, task: Task, recipe: Recipe, *, steps: Iterable[int], seed: int) -> None:
    """Replace the statistics of all batch norms with their means over the batches of these steps, in place.

    The losses of the task are computed without gradients, with the recipe's batch, augmentation and precision, on the
    device of the model. Only batch norms are in training mode, so dropout is off. The seed and the numbers of the steps
    determine the batches. The states of the global generators are restored.

    Frozen batch norms keep their statistics: those without running statistics, and those in evaluation mode in a model
    that is in training mode. So do batch norms that the losses do not run.
    """
    device = device_of(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(disable_autocast(device))
        stack.enter_context(preserve_modes(model))
        stack.enter_context(channels_last(model, enabled=recipe.channels_last))
        reseed = stack.enter_context(fork_rng(device))
        norms = tuple(batch_norms(model))
        model.eval()
        for norm in norms:
            norm.train()
        stack.enter_context(_averaging(norms))
        for number in steps:
            reseed(derive_seed(seed, "recalibration", number))
            with autocast(recipe, device):
                loss_without_gradients(task, model, Step(number=number, seed=seed, recipe=recipe, device=device))
            torch.clear_autocast_cache()


def loss_without_gradients(task: Task, model: nn.Module, step: Step) -> None:
    """Run the task's loss for its effects on the model. Raise InvalidValue if the loss needs gradients itself."""
    with torch.no_grad():
        try:
            task.loss(model, step)
        except RuntimeError as error:
            if "does not require grad" in str(error):
                raise InvalidValue(
                    "The task's loss computes gradients itself, so it cannot run without them, as this method needs. "
                    'The method "trained" does not need that (--method trained).'
                ) from error
            raise


def batch_norms(model: nn.Module) -> Iterator[_BatchNorm | FunctionalNorm]:
    """Yield the batch norms whose statistics change in training.

    As in train(), a batch norm in evaluation mode is frozen if the model is in training mode.
    """
    for module in model.modules():
        changes = (isinstance(module, _BatchNorm) and module.running_mean is not None) or (
            isinstance(module, FunctionalNorm) and module.follows_mode
        )
        if changes and (module.training or not model.training):
            yield module  # type: ignore[misc]


def autocast(recipe: Recipe, device: torch.device) -> torch.autocast:
    """Return the autocast for the precision of the recipe."""
    if recipe.precision == "float32":
        return torch.autocast(device.type, enabled=False)
    return torch.autocast(device.type, dtype=getattr(torch, recipe.precision))


@contextlib.contextmanager
def _averaging(norms: Iterable[_BatchNorm | FunctionalNorm]) -> Iterator[None]:
    """Let the batch norms average over all their batches with equal weights. Restore their momenta on exit."""
    momenta = {norm: norm.momentum for norm in norms}
    batches = Counter[nn.Module]()

    def count(norm: nn.Module, _: object) -> None:
        # With momentum=None, PyTorch would do the same, but wait for the device to know the number of batches.
        if not batches[norm] and isinstance(norm, _BatchNorm):
            norm.reset_running_stats()
        batches[norm] += 1
        norm.momentum = 1 / batches[norm]  # type: ignore[assignment]

    hooks = [norm.register_forward_pre_hook(count) for norm in norms]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for norm, momentum in momenta.items():
            norm.momentum = momentum
