"""The task: what the user's code plugs in. Two callables are enough."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from depthfold.errors import InvalidValue
from depthfold.support.coerce import as_text, as_whole
from depthfold.training.recipe import Recipe

# "holdout" is a part of the training set and serves the importances; "test" is for the final figures alone.
Split = Literal["holdout", "test"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of training, as the task sees it.

    What the task does in a step follows from this alone: a run that is interrupted and resumed, or that is run by
    another worker, takes the same steps. `number` counts from 0; `seed` differs from one training to the next. In a
    distributed run the processes are numbered by `rank`, and each takes its part of the batch.
    """

    number: int
    seed: int
    recipe: Recipe
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    teacher: Callable[[Tensor], Tensor] | None = None
    rank: int = 0
    world: int = 1

    def generator(self, purpose: str = "") -> torch.Generator:
        """Random numbers of this step alone, on its device; different ones for each purpose."""
        return torch.Generator(device=self.device).manual_seed(mix(self.seed, purpose, self.number, self.rank))


@runtime_checkable
class Task(Protocol):
    """How to train a model, and how to score it.

    `loss` draws the batch of a step, moves it to the step's device and returns the loss; it is called under autocast
    where the recipe asks for it, and uses `step.teacher`, if there is one, for distillation. `score` is higher for a
    better model; it is called with the model in evaluation mode and without gradients.

    Two attributes are optional. `identity`, text, tells the task from others: what was kept of another is not taken for
    its own. `holds_out` is False where there is no hold-out set; such a task is trained without scores.
    """

    def loss(self, model: nn.Module, step: Step) -> Tensor: ...

    def score(self, model: nn.Module, split: Split) -> float: ...

    def steps_per_epoch(self, recipe: Recipe) -> int:
        """How many steps of the recipe's batch see the training set (without the hold-out) once."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTask:
    """A task of two functions: `loss(model, step)` and `score(model, split)`. `epoch` is how many steps make one; a
    recipe that counts in steps does not need it. `identity` names the task, its data and its version: functions do not
    tell one from another, so without it a run takes what it holds of any other such task for this one's."""

    loss: Callable[[nn.Module, Step], Tensor]
    score: Callable[[nn.Module, Split], float]
    epoch: int | None = None
    identity: str = ""

    def __post_init__(self) -> None:
        as_text("The identity of a task", self.identity, InvalidValue)
        for name in ("loss", "score"):
            if not callable(function := getattr(self, name)):
                raise InvalidValue(f"The {name} of a task is a function, found {function!r:.80}.")
        if self.epoch is not None:
            as_whole("The steps of an epoch", self.epoch, InvalidValue)

    def steps_per_epoch(self, recipe: Recipe) -> int:
        if self.epoch is None:
            raise InvalidValue(
                f"The recipe asks for {recipe.epochs:g} epochs, and this task does not say how many steps make one. "
                "Give the task epoch=..., or the recipe steps=..."
            )
        return self.epoch


def expect_task(task: object) -> None:
    if not isinstance(task, Task):
        raise InvalidValue(
            f"A task has the methods loss, score and steps_per_epoch; {type(task).__name__} lacks one of them. "
            "FunctionTask(loss=..., score=...) makes one of two functions."
        )
    as_text(f"The identity of a task ({type(task).__name__}.identity)", getattr(task, "identity", ""), InvalidValue)


def task_name(task: Task) -> str:
    """What the task says of itself, or its class where it says nothing."""
    return getattr(task, "identity", "") or type(task).__qualname__


def holds_out(task: object) -> bool:
    """Whether the task has a hold-out set to score on. One that does not say has one."""
    return bool(getattr(task, "holds_out", True))


def expect_holdout(task: object) -> None:
    if not holds_out(task):
        raise InvalidValue(
            "Importances are scored on a part of the training set that is held out, and this task holds out nothing. "
            "Give it one: holdout=0.1 for a tenth of each class, say."
        )


def mix(*parts: object) -> int:
    """One seed out of several things: the same on every machine, and no two alike by accident."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "big")
