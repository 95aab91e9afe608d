"""One step of training, and all that a step changes: weights, momentum, average, scale. Checkpoints hold that."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from depthfold.errors import InvalidValue
from depthfold.tracing.weights import weights
from depthfold.training.place import Place
from depthfold.training.recipe import Recipe
from depthfold.training.task import Step, Task

# The average of a model's weights over the steps of its training.


class Average:
    """A copy of the model whose parameters follow the trained ones: a = decay * a + (1 - decay) * w after each step.

    Buffers (the statistics of batch norms) are averages already, and are copied.
    """

    __slots__ = ("_pairs", "_source", "decay", "model")

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay
        self._source = model
        # By name, because the copy of an fx graph may order its modules differently; once each, because one parameter
        # may have several names.
        weights = dict(model.named_parameters(remove_duplicate=False))
        copies = dict(self.model.named_parameters(remove_duplicate=False))
        self._pairs = tuple({id(copies[name]): (copies[name], weights[name]) for name in copies}.values())

    @torch.no_grad()
    def update(self) -> None:
        for average, weight in self._pairs:
            average.lerp_(weight, 1 - self.decay)
        self.copy_buffers()

    @torch.no_grad()
    def copy_buffers(self) -> None:
        buffers = dict(self._source.named_buffers(remove_duplicate=False))
        for name, average in self.model.named_buffers(remove_duplicate=False):
            average.copy_(buffers[name])

    def named(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The averages by the names of the model's parameters and buffers."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        own = parameters | dict(self.model.named_buffers(remove_duplicate=False))
        return {name: own[name] for name in names}


# How long a training is, and the learning rate of each of its steps.


def total_steps(recipe: Recipe, task: Task) -> int:
    """How many steps the recipe asks for; a part of a step is rounded, and one is the least."""
    if recipe.epochs is None:
        return recipe.steps or 0  # a recipe has one of the two
    total = max(1, round(recipe.epochs * task.steps_per_epoch(recipe)))
    if recipe.warmup >= total:
        raise InvalidValue(
            f"The recipe warms up for {recipe.warmup} steps, and its {recipe.epochs:g} epochs are {total} steps; fewer "
            "must be left for the warm-up, so that the learning rate falls again."
        )
    return total


def due(every: int | None, done: int, total: int) -> bool:
    """Whether something that is done every so many steps, and at the end, is to be done after so many."""
    return done == total or (every is not None and done % every == 0)


def learning_rate(recipe: Recipe, step: int, total: int) -> float:
    """The learning rate of a step, counted from 0: linear up to the recipe's own, which the first step after the
    warm-up takes, then along a half cosine that would reach 0 one step after the last."""
    if step < recipe.warmup:
        return recipe.lr * (step + 1) / (recipe.warmup + 1)
    done = (step - recipe.warmup) / (total - recipe.warmup)
    return recipe.lr * 0.5 * (1 + math.cos(math.pi * done))


_HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_MOMENTUM = "momentum_buffer"  # what SGD calls it

# Where float16 gradients overflow, the scaler halves its scale and leaves the step out. Below this the gradients are
# not too large, they are no numbers, and every step would be left out.
SMALLEST_SCALE = 2.0**-24


class Stepper:
    """Takes the steps of one training, on a model that is in its place already."""

    def __init__(self, model: nn.Module, recipe: Recipe, place: Place) -> None:
        self.model, self.recipe, self.place = model, recipe, place
        # In a model that is training, what is not is so on purpose: a batch norm whose statistics are to stay.
        self._evaluated = tuple(part for part in model.modules() if model.training and not part.training)
        self.train_mode()
        self.parameters = tuple(p for p in model.parameters() if p.requires_grad)
        if not self.parameters:
            raise InvalidValue(
                "No parameter of the model takes a gradient, so there is nothing to train. Set requires_grad on those "
                "that are to change."
            )
        self.optimizer = torch.optim.SGD(
            self.parameters,
            lr=recipe.lr,
            momentum=recipe.momentum,
            nesterov=recipe.nesterov,
            weight_decay=recipe.weight_decay,
        )
        self.optimizer.zero_grad(set_to_none=True)  # gradients of the user's are none of ours
        # accelerate's own precision belongs to the whole process and cannot change in it, so the recipe's is set here.
        self.autocast: dict[str, Any] = {"device_type": place.device.type, "enabled": recipe.precision in _HALF}
        if recipe.precision in _HALF:
            self.autocast["dtype"] = _HALF[recipe.precision]
        self.scaler = torch.amp.GradScaler(place.device.type, enabled=recipe.precision == "float16")
        self.average = Average(model, recipe.ema) if recipe.ema is not None else None
        self._constants = _not_finite(weights(model))
        self._trained = self._distributed()

    def train_mode(self) -> None:
        """Put the model into training mode, but for the parts that the user had in evaluation mode in a model that was
        in training mode."""
        self.model.train()
        for part in self._evaluated:
            part.training = False

    def step(self, task: Task, step: Step, lr: float) -> Tensor:
        """Take one step and return its loss, still on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with torch.autocast(**self.autocast):
            loss = task.loss(self._trained, step)
        _expect_loss(loss)
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if self.recipe.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.parameters, self.recipe.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update()
        torch.clear_autocast_cache()  # of the weights as they were: PyTorch keeps it until the outermost autocast ends
        return loss.detach().reshape(())

    @property
    def scored(self) -> nn.Module:
        """The model whose score counts, and which is kept: the average, where there is one."""
        return self.model if self.average is None else self.average.model

    def tensors(self) -> dict[str, Tensor]:
        """What a step changes, as it is now: weights and buffers, momentum, and their averages."""
        found = {f"model.{name}": tensor for name, tensor in weights(self.model).items()}
        for name, parameter in self.model.named_parameters():
            momentum = self.optimizer.state.get(parameter, {}).get(_MOMENTUM)
            if momentum is not None:
                found[f"momentum.{name}"] = momentum
        if self.average is not None:
            found |= {f"average.{name}": tensor for name, tensor in self.kept().items()}
        return found

    def kept(self) -> dict[str, Tensor]:
        """The weights of the model whose score counts, by the names that the trained one has for them."""
        own = weights(self.model)
        return own if self.average is None else self.average.named(own)

    def expect_momentum(self, names: Iterable[str]) -> None:
        """Make room for the momentum of the tensors that are named so."""
        parameters = dict(self.model.named_parameters())
        for name in names:
            kind, _, parameter = name.partition(".")
            if kind == "momentum":
                self.optimizer.state[parameters[parameter]][_MOMENTUM] = torch.zeros_like(parameters[parameter])

    def gather(self) -> None:
        """Give all processes the buffers of the first one: each has its own statistics of its part of the batch."""
        if self.place.world > 1:
            self.place.share(self.model.buffers())
            if self.average is not None:
                self.average.copy_buffers()

    def finite(self) -> bool:
        """Whether everything that a checkpoint would hold is, but for what was not when the training began: a mask of
        -inf, say, has not come of the steps."""
        scale = self.scaler.get_scale() if self.scaler.is_enabled() else 1.0
        tensors = {name: each for name, each in self.tensors().items() if name.partition(".")[2] not in self._constants}
        return scale >= SMALLEST_SCALE and not _not_finite(tensors)

    def _distributed(self) -> nn.Module:
        if self.place.world == 1:
            return self.model
        devices = None if self.place.device.type == "cpu" else [self.place.device]
        return DistributedDataParallel(self.model, device_ids=devices)


def _not_finite(tensors: Mapping[str, Tensor]) -> frozenset[str]:
    """The names of those that hold a number that is not finite; the device is asked once."""
    floats = {name: tensor.isfinite().all() for name, tensor in tensors.items() if tensor.is_floating_point()}
    answers = torch.stack(tuple(floats.values())).tolist() if floats else ()
    return frozenset(name for name, finite in zip(floats, answers, strict=True) if not finite)


@torch.no_grad()
def copy_into(live: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> None:
    for name, tensor in live.items():
        tensor.copy_(kept[name])


def _expect_loss(loss: object) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise InvalidValue(f"The task's loss must be a tensor with one number in it, found {found}.")
    if not loss.requires_grad:
        raise InvalidValue(
            "The task's loss does not depend on the model's parameters: it has no gradient. Was it detached, or made "
            "into a number and back?"
        )
