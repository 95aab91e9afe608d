"""The task: the user's loss and score."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from depthfold.errors import InvalidValue
from depthfold.support.coerce import as_text, as_whole
from depthfold.training.recipe import Recipe

# "holdout" is a part of the training set, used for importances; "test" is used only for the final scores.
Split = Literal["holdout", "test"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One training step, as the task sees it.

    A task must depend on nothing else in a step, so that a training run that is resumed, or that runs on another
    worker, takes the same steps. `number` counts from 0, and each training run has its own `seed`. In distributed
    training, `rank` is the number of this process, and each of the `world_size` processes takes its part of the batch.
    """

    number: int
    seed: int
    recipe: Recipe
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    teacher: Callable[..., Any] | None = None
    rank: int = 0
    world_size: int = 1

    def generator(self, purpose: str = "") -> torch.Generator:
        """Return a generator on the device of the step. Its seed depends on the step, the rank and the purpose."""
        return torch.Generator(device=self.device).manual_seed(derive_seed(self.seed, purpose, self.number, self.rank))


@runtime_checkable
class Task(Protocol):
    """The loss that a model is trained with, and its score.

    `loss` draws the batch of a step, moves it to the device of the step and returns the loss. It runs under autocast if
    the recipe asks for it, and uses `step.teacher`, if there is one, for distillation: it is called as the model is.
    `score` is higher for a better model; the model is in evaluation mode, and gradients are off.

    A task that also makes its batch separately is a BatchTask; on a GPU it trains faster.

    Two attributes are optional. `identity` is text that distinguishes the task from others: results of another task are
    not reused. `has_holdout` is False if there is no hold-out set; such a task is trained without scores.
    """

    def loss(self, model: nn.Module, step: Step) -> Tensor: ...

    def score(self, model: nn.Module, split: Split) -> float: ...

    def steps_per_epoch(self, recipe: Recipe) -> int:
        """Return the number of batches of the recipe in the training set, without the hold-out set."""
        ...


@runtime_checkable
class BatchTask(Task, Protocol):
    """A task whose steps can be captured in a CUDA graph. Its loss is `batch_loss(model, batch(step), step)`.

    `batch` may run any code. `batch_loss` is captured once and then replayed with the tensors of other batches, without
    running its Python code again. So it may depend on the batch, the model, `step.recipe` and `step.teacher`, but not
    on `step.number` or anything else that changes from step to step. All batches have the same shapes.
    """

    def batch(self, step: Step) -> tuple[Tensor, ...]:
        """Return the tensors of a step, on its device."""
        ...

    def batch_loss(self, model: nn.Module, batch: tuple[Tensor, ...], step: Step) -> Tensor: ...


@runtime_checkable
class OutputTask(Task, Protocol):
    """A task that can compare the outputs of two models. Cheap importances are then scored without labels.

    Outputs change smoothly where an accuracy changes in steps, so fewer images tell two networks apart.
    """

    def outputs(self, model: nn.Module, split: Split) -> Tensor:
        """Return the outputs for all inputs of the split, always in the same order."""
        ...

    def divergences(self, outputs: Tensor, reference: Tensor) -> Tensor:
        """Return for each input how far an output is from the reference, 0 if they are equal."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTask:
    """A task made of two functions: `loss(model, step)` and `score(model, split)`.

    `epoch_steps` is the number of steps per epoch; a recipe with `steps` does not need it. `identity` names the task,
    its data and its version. Two tasks without an identity are not distinguished.
    """

    loss: Callable[[nn.Module, Step], Tensor]
    score: Callable[[nn.Module, Split], float]
    epoch_steps: int | None = None
    identity: str = ""

    def __post_init__(self) -> None:
        as_text("The identity of a task", self.identity, InvalidValue)
        for name in ("loss", "score"):
            if not callable(function := getattr(self, name)):
                raise InvalidValue(f"The {name} of a task must be a function, found {function!r:.80}.")
        if self.epoch_steps is not None:
            as_whole("epoch_steps", self.epoch_steps, InvalidValue)

    def steps_per_epoch(self, recipe: Recipe) -> int:
        if self.epoch_steps is None:
            raise InvalidValue(
                f"The recipe asks for {recipe.epochs:g} epochs, but this task does not know how many steps an epoch "
                "has. Give the task epoch_steps=..., or the recipe steps=..."
            )
        return self.epoch_steps


def check_task(task: object) -> None:
    if not isinstance(task, Task):
        raise InvalidValue(
            f"A task has the methods loss, score and steps_per_epoch; {type(task).__name__} lacks one of them. "
            "FunctionTask(loss=..., score=...) makes a task from two functions."
        )
    as_text(f"The identity of a task ({type(task).__name__}.identity)", getattr(task, "identity", ""), InvalidValue)


def score_of(task: Task, model: nn.Module, split: Split) -> float:
    """Return the score of the model. Raise InvalidValue if it is not a single number."""
    score: object = task.score(model, split)
    try:
        if isinstance(score, str | bytes):
            raise TypeError("float() would read it")
        return float(score)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError) as error:
        found = f"a tensor of shape {tuple(score.shape)}" if isinstance(score, Tensor) else type(score).__name__
        raise InvalidValue(
            f"The task's score must be a single number, higher for a better model, found {found}."
        ) from error


def task_name(task: Task) -> str:
    """Return the identity of the task, or the name of its class if it has none."""
    return getattr(task, "identity", "") or type(task).__qualname__


def has_holdout(task: object) -> bool:
    """Return False if the task says that it has no hold-out set."""
    return bool(getattr(task, "has_holdout", True))


def check_has_holdout(task: object) -> None:
    if not has_holdout(task):
        raise InvalidValue(
            "Importances are scored on a hold-out part of the training set, but this task has none. Give it one, for "
            "example holdout=0.1 for a tenth of each class."
        )


def check_keeps_last(recipe: Recipe) -> None:
    """Raise InvalidValue if the recipe keeps the best weights: without a hold-out set, they are not known."""
    if recipe.keep == "best":
        raise InvalidValue(
            'The recipe keeps the weights of the best score (keep="best"), but there is no hold-out set to score on. '
            'Give the task one (for example holdout=0.1), or use recipe.replace(keep="last").'
        )


def derive_seed(*parts: object) -> int:
    """Return a seed that is determined by the parts, and is the same on every machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "big")
