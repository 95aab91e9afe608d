"""How long a training is, and the learning rate of each of its steps."""

from __future__ import annotations

import math

from depthfold.errors import InvalidValue
from depthfold.training.recipe import Recipe
from depthfold.training.task import Task


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
