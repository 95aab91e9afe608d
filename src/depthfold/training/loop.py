"""train(): the one loop, for the importances' short trainings and for fine-tuning."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import torch
from torch import nn

from depthfold.core.coerce import as_path
from depthfold.errors import InvalidValue
from depthfold.progress import Progress, silent
from depthfold.training.borrowing import lent, modes_kept, own_precision, own_random_numbers, placed
from depthfold.training.checkpoints import Checkpoints, Identity
from depthfold.training.losses import Losses
from depthfold.training.metrics import Trained
from depthfold.training.place import find_place
from depthfold.training.recipe import Recipe
from depthfold.training.run import Run
from depthfold.training.schedule import total_steps
from depthfold.training.stepper import Stepper
from depthfold.training.task import Split, Step, Task, expect_task


def train(
    model: nn.Module,
    task: Task,
    recipe: Recipe,
    *,
    seed: int | None = None,
    teacher: nn.Module | None = None,
    split: Split | None = "holdout",
    folder: str | Path | None = None,
    about: str = "",
    device: str | torch.device | None = None,
    tensorboard: bool = False,
    progress: Progress = silent,
) -> Trained:
    """Train the model, in place, and score it on `split`.

    The device, and the other processes of an `accelerate launch`, are accelerate's to say; with `device` this process
    trains alone on it. The model stays there. Without a `seed` the recipe's is taken: model, task, recipe and seed
    decide every step, and the global random numbers are afterwards as they were. With a `folder` the training keeps
    checkpoints and metrics there and, run again, goes on from the last one, to the same weights; `about` says what
    kind of model it is where its weights do not. The teacher is put back as it was found. A model in training mode may
    have parts in evaluation mode, which stay so; one in evaluation mode is trained as a whole.
    """
    _expect(model, task, recipe, split, folder, tensorboard)
    place, total = find_place(device), total_steps(recipe, task)
    if recipe.batch % place.world:
        raise InvalidValue(
            f"The recipe's batch of {recipe.batch} cannot be parted evenly among {place.world} processes. Take a "
            f"multiple of {place.world}."
        )
    seed = recipe.seed if seed is None else seed
    with contextlib.ExitStack() as stack:
        stack.enter_context(modes_kept(model))
        stack.enter_context(placed(model, place.device, recipe.channels_last))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(own_precision(place.device))
        lesson = stack.enter_context(lent(teacher, model, place.device))
        reseed = stack.enter_context(own_random_numbers(place.device))
        stepper = Stepper(model, recipe, place)
        losses = Losses(recipe, place, total)
        run = Run(task=task, stepper=stepper, total=total, split=split, losses=losses, seed=seed, reseed=reseed)
        if folder is not None:
            run.identity = Identity.of(
                model, task, recipe, teacher=teacher, steps=total, seed=seed, split=split, about=about
            )
            run.checkpoints = Checkpoints(folder, place, tensorboard)
            run.take_up(stack.enter_context(run.checkpoints.resumed(run.identity, stepper)))
        tick = progress("steps", total, run.done) if place.main else silent("", 0, 0)
        step = Step(
            number=0,
            seed=seed,
            recipe=recipe,
            device=place.device,
            teacher=lesson,
            rank=place.rank,
            world=place.world,
        )
        for number in range(run.done, total):
            run.take(dataclasses.replace(step, number=number))
            tick()
        return run.finish()


def _expect(model: object, task: object, recipe: object, split: object, folder: object, tensorboard: bool) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidValue(f"train() trains an nn.Module, found {type(model).__name__}.")
    expect_task(task)
    if not isinstance(recipe, Recipe):
        raise InvalidValue(f'train() takes a Recipe, found {recipe!r:.80}. preset("quick") is one.')
    if split is None and recipe.keep == "best":
        raise InvalidValue(
            'The recipe keeps the weights of the best score (keep="best"), and there is nothing to score on. Give the '
            'task a hold-out set (holdout=0.1, say), or keep the last weights: recipe.but(keep="last").'
        )
    if folder is not None:
        as_path("The folder of a training", folder, InvalidValue)
    elif tensorboard:
        raise InvalidValue("TensorBoard's files go into the folder of the training: give it one.")
