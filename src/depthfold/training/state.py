"""Which training a folder belongs to, and how far it has got: the JSON half of a checkpoint."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from depthfold.core import Document
from depthfold.errors import CheckpointError
from depthfold.tracing.weights import digest_of, weights
from depthfold.training.curve import Point
from depthfold.training.recipe import Recipe
from depthfold.training.stepper import due
from depthfold.training.task import Task, task_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What makes two trainings the same one. `about` is what weights do not show: the plan of a student, say. The task
    has its name, the teacher its class and a digest."""

    recipe: Recipe
    steps: int
    seed: int
    split: str | None
    shapes: str
    weights: str
    task: str
    teacher: str | None
    about: str = ""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        task: Task,
        recipe: Recipe,
        *,
        teacher: nn.Module | None,
        steps: int,
        seed: int,
        split: str | None,
        about: str,
    ) -> Identity:
        """Of a training that starts from the model as it is now."""
        tensors = weights(model)
        return cls(
            recipe=recipe,
            steps=steps,
            seed=seed,
            split=split,
            shapes=_shapes(tensors),
            weights=digest_of(tensors)[:16],
            task=task_name(task),
            teacher=None if teacher is None else _name_of(teacher),
            about=about,
        )

    def expect(self, found: Identity, folder: Path) -> None:
        if differences := "; ".join(_differences(found, self)):
            raise CheckpointError(
                f"The folder {folder} holds another training: {differences}. Give this one a folder of its own, or "
                "delete that one to start again."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class State(Document):
    """How far a training has got. `pending` are the losses that the next mean begins with; `scale` and `growth` are
    those of float16's scaler."""

    FORMAT: ClassVar[str] = "depthfold.checkpoint"
    VERSION: ClassVar[int] = 2  # the first one knew neither task nor teacher

    identity: Identity
    step: int
    seconds: float
    loss: float
    pending: tuple[float, ...] = ()
    curve: tuple[Point, ...] = ()
    best: Point | None = None
    scale: float | None = None
    growth: int = 0

    @property
    def unscored(self) -> bool:
        """Whether the score after its step is due and was not taken: the task's score failed, or a kill came first."""
        identity = self.identity
        wanted = identity.split is not None and due(identity.recipe.evaluate, self.step, identity.steps)
        return wanted and (not self.curve or self.curve[-1].step < self.step)


def _shapes(tensors: Mapping[str, Tensor]) -> str:
    text = repr(sorted((name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _name_of(teacher: nn.Module) -> str:
    """Its class, and a digest of its weights and of what its modules are called and of which kind they are."""
    modules = sorted((name, type(module).__qualname__) for name, module in teacher.named_modules())
    return f"{type(teacher).__name__} {digest_of(weights(teacher), repr(modules))[:16]}"


def _differences(there: Identity, here: Identity) -> Iterator[str]:
    for field in dataclasses.fields(Recipe):
        yield from _difference(f"the recipe's {field.name}", there.recipe, here.recipe, field.name)
    if there.recipe == here.recipe:  # otherwise it follows from it
        yield from _difference("the number of steps", there, here, "steps")
    yield from _difference("the seed", there, here, "seed")
    yield from _difference("the split that is scored", there, here, "split")
    if there.shapes != here.shapes:
        yield "the model has parameters of other names or shapes"
    elif there.weights != here.weights:
        yield "the model starts from other weights"
    yield from _difference("the model", there, here, "about")
    yield from _difference("the task", there, here, "task")
    yield from _difference("the teacher", there, here, "teacher")


def _difference(what: str, there: Any, here: Any, name: str) -> Iterator[str]:
    one, two = getattr(there, name), getattr(here, name)
    if one != two:
        yield f"{what} is {one!r} there and {two!r} here"
