"""One training step, and the state that it changes: weights, momentum, averaged weights and loss scale."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from depthfold.errors import InvalidValue
from depthfold.tracing.weights import weights
from depthfold.training.contexts import HALF
from depthfold.training.device import DeviceContext
from depthfold.training.recipe import Recipe
from depthfold.training.task import Task

_MOMENTUM = "momentum_buffer"  # its key in the state of SGD

# When float16 gradients overflow, the scaler halves its scale and skips the step. Below this scale the gradients are
# not too large but NaN, and every step would be skipped.
SMALLEST_SCALE = 2.0**-24


# --- Schedule ---


def total_steps(recipe: Recipe, task: Task) -> int:
    """Return the number of steps of a training run, rounded and at least one."""
    if recipe.epochs is None:
        return recipe.steps or 0  # a recipe has one of the two
    total = max(1, round(recipe.epochs * task.steps_per_epoch(recipe)))
    if recipe.warmup >= total:
        raise InvalidValue(
            f"The recipe's warmup ({recipe.warmup}) must be shorter than its {recipe.epochs:g} epochs ({total} steps)."
        )
    return total


def due(every: int | None, done: int, total: int) -> bool:
    """Return True at the end of a training run and after every `every` steps."""
    return done == total or (every is not None and done % every == 0)


def learning_rate(recipe: Recipe, step: int, total: int) -> float:
    """Return the learning rate of a step, counted from 0.

    It rises linearly during the warm-up, and the first step after it takes the recipe's `lr`. Then it follows half a
    cosine that would reach 0 one step after the last.
    """
    if step < recipe.warmup:
        return recipe.lr * (step + 1) / (recipe.warmup + 1)
    done = (step - recipe.warmup) / (total - recipe.warmup)
    return recipe.lr * 0.5 * (1 + math.cos(math.pi * done))


# --- Averaged weights ---


class AveragedWeights:
    """A copy of the model with the exponential moving average of its parameters. Buffers are copied.

    torch.optim.swa_utils.AveragedModel pairs parameters by their order, which differs between an fx graph and its copy.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self._source, self._update = model, get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        parameters = dict(model.named_parameters(remove_duplicate=False))
        copies = dict(self.model.named_parameters(remove_duplicate=False))
        # Each parameter once, even if it has several names.
        pairs = {id(copies[name]): (copies[name], parameters[name]) for name in copies}.values()
        self._averages, self._parameters = [pair[0] for pair in pairs], [pair[1] for pair in pairs]

    def update(self) -> None:
        self._update(self._averages, self._parameters, 0)  # the average does not depend on the number of updates
        self.copy_buffers()

    @torch.no_grad()
    def copy_buffers(self) -> None:
        buffers = dict(self._source.named_buffers(remove_duplicate=False))
        for name, average in self.model.named_buffers(remove_duplicate=False):
            average.copy_(buffers[name])

    def named(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the averaged parameters and the buffers that have these names in the model."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        own = parameters | dict(self.model.named_buffers(remove_duplicate=False))
        return {name: own[name] for name in names}


# --- Steps ---


class ZeroGradient(UserWarning):
    """The gradient of the first step is zero, so that nothing is trained."""


def fuses_update(recipe: Recipe, context: DeviceContext) -> bool:
    """Return True if SGD updates all weights in one operation, which reads its learning rate on the device.

    Only this can be captured in a CUDA graph. It is used wherever a graph is possible, with or without one, so that
    both have the same results.
    """
    return context.device.type == "cuda" and context.world_size == 1 and recipe.precision != "float16"


class Stepper:
    """Takes the steps of one training run. The model must already be on its device."""

    def __init__(self, model: nn.Module, recipe: Recipe, context: DeviceContext) -> None:
        self.model, self.recipe, self.context = model, recipe, context
        # In a model in training mode, the user has put these parts into evaluation mode, for example a batch norm whose
        # statistics must not change.
        self._frozen_modes = tuple(part for part in model.modules() if model.training and not part.training)
        self.train_mode()
        self.parameters = tuple(p for p in model.parameters() if p.requires_grad)
        if not self.parameters:
            raise InvalidValue(
                "No parameter of the model requires a gradient, so there is nothing to train. Call requires_grad_() on "
                "those to be trained."
            )
        _check_types(model, recipe)
        self._fused = fuses_update(recipe, context)
        self.optimizer = torch.optim.SGD(
            self.parameters,
            lr=recipe.lr,
            momentum=recipe.momentum,
            nesterov=recipe.nesterov,
            weight_decay=recipe.weight_decay,
            fused=self._fused or None,
        )
        if self._fused:
            self.keep_lr_on_device()
        self.optimizer.zero_grad(set_to_none=True)  # drop gradients of the user
        # Not by accelerate, which fixes one precision for the whole process.
        self.autocast: dict[str, Any] = {"device_type": context.device.type, "enabled": recipe.precision in HALF}
        if recipe.precision in HALF:
            self.autocast["dtype"] = HALF[recipe.precision]
        self.scaler = torch.amp.GradScaler(context.device.type, enabled=recipe.precision == "float16")
        context.broadcast((*model.parameters(), *model.buffers()))  # all processes start with the same weights
        self.average = AveragedWeights(model, recipe.ema) if recipe.ema is not None else None
        self._not_finite_at_start = _not_finite(weights(model))
        self.add_to_loss: Callable[[Tensor], Tensor] = lambda loss: loss  # set if the recipe matches features
        self._has_gradient: Tensor | bool | None = None  # in the first step; a tensor until check_gradient() reads it

    def train_mode(self) -> None:
        """Put the model into training mode, except for the parts that were in evaluation mode in a training model."""
        self.model.train()
        for part in self._frozen_modes:
            part.training = False

    def keep_lr_on_device(self) -> None:
        """Keep the learning rate in a tensor, which a captured update reads at every replay."""
        for group in self.optimizer.param_groups:
            if not isinstance(group["lr"], Tensor):
                group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=self.context.device)

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def step(self, loss_of: Callable[[nn.Module], Tensor]) -> Tensor:
        """Take one step with the loss of the model, and return the loss, still on the device."""
        self.context.broadcast(self.model.buffers())  # a forward in training mode may read them
        with torch.autocast(**self.autocast):
            loss = loss_of(self.model)
            _check_loss(loss)
            loss = self.add_to_loss(loss)
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.context.average_gradients(self.parameters)
        if self._has_gradient is None:
            self._has_gradient = _has_gradient(self.parameters)
        if self.recipe.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.parameters, self.recipe.clip)
        if self._fused and self.recipe.momentum:
            self._allocate_first_momentum()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update()
        torch.clear_autocast_cache()  # PyTorch keeps the cast weights until the outermost autocast ends
        return loss.detach().reshape(())

    def check_gradient(self, loss: Tensor) -> None:
        """Warn if the gradient of the first step, which had this loss, is zero. Only the first call reads the device.

        A loss of zero is not reported: it may be the least possible one, for example if a student equals its teacher.
        """
        if isinstance(self._has_gradient, Tensor):
            self._has_gradient = bool(self._has_gradient)
            if not self._has_gradient and self.context.is_main and (value := loss.item()):
                warnings.warn(
                    f"The loss of the first step is {value:.4g}, and its gradient is zero for every parameter of the "
                    "model, so nothing is trained. Check whether the task's loss depends on the outputs of the model.",
                    ZeroGradient,
                    stacklevel=2,
                )

    def snapshot(self) -> dict[str, Tensor]:
        """Return copies of everything that a step changes."""
        return {name: tensor.detach().clone() for name, tensor in self.tensors().items()}

    @torch.no_grad()
    def restore(self, snapshot: Mapping[str, Tensor]) -> None:
        """Take back the steps since the snapshot. Momentum that they allocated becomes 0, which is equal to none."""
        for name, tensor in self.tensors().items():
            if name in snapshot:
                tensor.copy_(snapshot[name])
            else:
                tensor.zero_()
        self.optimizer.zero_grad(set_to_none=True)
        torch.clear_autocast_cache()

    @property
    def scored_model(self) -> nn.Module:
        """The model that is scored and kept: the one with averaged weights, if there is one."""
        return self.model if self.average is None else self.average.model

    def scored_weights(self) -> dict[str, Tensor]:
        """Return the weights of the scored model, by their names in the trained model."""
        own = weights(self.model)
        return own if self.average is None else self.average.named(own)

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that a step changes: weights and buffers, momentum, and the averages."""
        found = {f"model.{name}": tensor for name, tensor in weights(self.model).items()}
        for name, parameter in self.model.named_parameters():
            momentum = self.optimizer.state.get(parameter, {}).get(_MOMENTUM)
            if momentum is not None:
                found[f"momentum.{name}"] = momentum
        if self.average is not None:
            found |= {f"average.{name}": tensor for name, tensor in self.scored_weights().items()}
        return found

    def allocate_momentum(self, names: Iterable[str]) -> None:
        """Allocate the momentum tensors among these names, so that a checkpoint can be copied into them."""
        parameters = dict(self.model.named_parameters())
        for name in names:
            kind, _, parameter = name.partition(".")
            if kind == "momentum":
                self.optimizer.state[parameters[parameter]][_MOMENTUM] = torch.zeros_like(parameters[parameter])

    def _allocate_first_momentum(self) -> None:
        """Allocate the momentum of parameters with a first gradient. The fused update allocates either all or none."""
        for parameter in self.parameters:
            state = self.optimizer.state[parameter]
            if parameter.grad is not None and _MOMENTUM not in state:
                state[_MOMENTUM] = torch.zeros_like(parameter)

    def sync_buffers(self) -> None:
        """Copy the main process's buffers to all processes, since each has the statistics of its part of the batch."""
        if self.context.world_size > 1:
            self.context.broadcast(self.model.buffers())
            if self.average is not None:
                self.average.copy_buffers()

    def is_finite(self) -> bool:
        """Return False if a tensor of a checkpoint is not finite, ignoring those that were not finite at the start."""
        scale = self.scaler.get_scale() if self.scaler.is_enabled() else 1.0
        ignored = self._not_finite_at_start  # for example a mask of -inf
        tensors = {name: each for name, each in self.tensors().items() if name.partition(".")[2] not in ignored}
        return scale >= SMALLEST_SCALE and not _not_finite(tensors)


def _not_finite(tensors: Mapping[str, Tensor]) -> frozenset[str]:
    """Return the names of the tensors with a value that is not finite, with one transfer from the device."""
    floats = {name: tensor.isfinite().all() for name, tensor in tensors.items() if tensor.is_floating_point()}
    answers = torch.stack(tuple(floats.values())).tolist() if floats else ()
    return frozenset(name for name, finite in zip(floats, answers, strict=True) if not finite)


@torch.no_grad()
def copy_into(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> None:
    """Copy the tensors of the same names into the targets."""
    for name, tensor in targets.items():
        tensor.copy_(sources[name])


def _check_types(model: nn.Module, recipe: Recipe) -> None:
    """Raise InvalidValue for weights in half precision that PyTorch cannot train with the precision of the recipe.

    It does not unscale float16 gradients, and its batch norms do not combine float16 and bfloat16.
    """
    refused = set(HALF.values()) - ({torch.bfloat16} if recipe.precision == "bfloat16" else set())
    for name, parameter in model.named_parameters():
        if recipe.precision in HALF and parameter.requires_grad and parameter.dtype in refused:
            raise InvalidValue(
                f"The model's weights are {str(parameter.dtype).removeprefix('torch.')} ({name}), but training with "
                f"precision {recipe.precision} needs float32 weights. Convert them with model.float()."
            )


def _has_gradient(parameters: Iterable[Tensor]) -> Tensor:
    """Return whether a gradient is not zero, still on the device. Raise InvalidValue if no parameter has one."""
    found = [parameter.grad.any() for parameter in parameters if parameter.grad is not None]
    if not found:
        raise InvalidValue(
            "The task's loss has no gradient for any parameter of the model. Check whether the task uses the model "
            "that its loss is given, and not another one."
        )
    return torch.stack(found).any()


def _check_loss(loss: object) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise InvalidValue(f"The task's loss must be a tensor with a single number, found {found}.")
    if not loss.requires_grad:
        raise InvalidValue(
            "The task's loss has no gradient: it does not depend on the model's parameters. Check whether the task "
            "detaches it or converts it to a number."
        )
