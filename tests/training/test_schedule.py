"""The learning rate against the formula."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from depthfold.errors import InvalidValue
from depthfold.training.recipe import Recipe
from depthfold.training.stepper import learning_rate, total_steps
from depthfold.training.task import FunctionTask
from small_training import TASK


def test_the_cosine_is_the_one_that_pytorch_has():
    total, recipe = 37, Recipe(steps=37, lr=0.3)
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
    for step in range(total):
        assert learning_rate(recipe, step, total) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        scheduler.step()
    assert scheduler.get_last_lr()[0] == pytest.approx(0, abs=1e-12)


def test_the_warm_up_is_linear_and_reaches_the_recipes_rate_once():
    recipe = Recipe(steps=10, lr=0.8, warmup=3)
    rates = [learning_rate(recipe, step, 10) for step in range(10)]
    assert rates[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    expected = [0.4 * (1 + math.cos(math.pi * n / 7)) for n in range(7)]
    assert rates[3:] == pytest.approx(expected)
    assert all(one > two for one, two in pairwise(rates[3:]))


def test_the_length_is_counted_in_steps():
    assert total_steps(Recipe(steps=5), TASK) == 5
    assert total_steps(Recipe(epochs=2.5), TASK) == 10
    assert total_steps(Recipe(epochs=0.01), TASK) == 1


def test_a_length_that_the_task_cannot_tell_is_refused():
    task = FunctionTask(loss=TASK.loss, score=TASK.score)
    with pytest.raises(InvalidValue, match="The recipe asks for 2 epochs, and this task does not say"):
        total_steps(Recipe(epochs=2), task)


def test_a_warm_up_longer_than_the_training_is_refused():
    with pytest.raises(InvalidValue) as caught:
        total_steps(Recipe(epochs=2, warmup=8), TASK)
    assert str(caught.value) == (
        "The recipe warms up for 8 steps, and its 2 epochs are 8 steps; fewer must be left for the warm-up, so that "
        "the learning rate falls again."
    )
