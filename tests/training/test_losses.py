"""Losses are read together where reading one would wait for the device; none that is no number goes unnoticed."""

from __future__ import annotations

import math

import pytest
import torch

from depthfold.errors import NotFinite
from depthfold.training.loop import TOGETHER, Losses
from depthfold.training.place import Place
from depthfold.training.recipe import Recipe

RECIPE = Recipe(steps=100, lr=0.5, warmup=2, clip=1.0, precision="bfloat16")


def losses(device):
    return Losses(RECIPE, Place(device=torch.device(device)), total=100)


def test_on_a_cpu_each_is_read_at_once():
    taken = losses("cpu")
    taken.add(0, 0.1, torch.tensor(2.0))
    with pytest.raises(NotFinite, match=r"^The loss is inf at step 2 of 100"):
        taken.add(1, 0.1, torch.tensor(math.inf))


def test_elsewhere_they_are_read_together_and_the_step_is_still_the_right_one():
    taken = losses("cuda:0")  # where it says that they are; these are not
    for number in range(TOGETHER - 1):
        taken.add(number, number / 100, torch.tensor(math.nan if number >= 3 else 1.0))
    with pytest.raises(NotFinite) as caught:
        taken.add(TOGETHER - 1, 0.0, torch.tensor(math.nan))
    assert (caught.value.step, caught.value.lr) == (4, 0.03)
    assert str(caught.value) == (
        "The loss is nan at step 4 of 100, with the learning rate 0.03. Take a smaller learning rate than 0.5 (lr), or "
        'compute in float32 instead of bfloat16 (precision="float32").'
    )


def test_whoever_asks_for_the_mean_is_told_of_all_so_far():
    taken = losses("cuda:0")
    for number in range(3):
        taken.add(number, 0.1, torch.tensor(float(number)))
    assert taken.mean() == 1.0
    taken.add(3, 0.1, torch.tensor(7.0))
    assert taken.mean() == 7.0
    taken.add(4, 0.1, torch.tensor(math.nan))
    with pytest.raises(NotFinite, match=r"at step 5 of 100"):
        taken.mean()


def test_the_error_travels_between_processes():
    import pickle

    again = pickle.loads(pickle.dumps(NotFinite("so", step=3, lr=0.5)))
    assert (str(again), again.step, again.lr) == ("so", 3, 0.5)
