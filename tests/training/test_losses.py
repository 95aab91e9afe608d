"""Losses are read in groups on a GPU, and a loss that is not finite is always detected."""

from __future__ import annotations

import math

import pytest
import torch

from depthfold.errors import NotFinite
from depthfold.training import DeviceContext, Recipe
from depthfold.training.loop import READ_TOGETHER, Losses

RECIPE = Recipe(steps=100, lr=0.5, warmup=2, clip=1.0, precision="bfloat16")


def losses(device):
    return Losses(RECIPE, DeviceContext(device=torch.device(device)), total=100)


def test_losses_on_a_cpu_are_read_immediately():
    taken = losses("cpu")
    taken.add(0, 0.1, torch.tensor(2.0))
    with pytest.raises(NotFinite, match=r"^The loss is inf at step 2 of 100"):
        taken.add(1, 0.1, torch.tensor(math.inf))


def test_losses_on_a_gpu_are_read_in_groups_and_the_error_names_the_right_step():
    taken = losses("cuda:0")  # by name only: these tensors are on the CPU
    for number in range(READ_TOGETHER - 1):
        taken.add(number, number / 100, torch.tensor(math.nan if number >= 3 else 1.0))
    with pytest.raises(NotFinite) as caught:
        taken.add(READ_TOGETHER - 1, 0.0, torch.tensor(math.nan))
    assert (caught.value.step, caught.value.lr) == (4, 0.03)
    assert str(caught.value) == (
        "The loss is nan at step 4 of 100, with the learning rate 0.03. Use a smaller learning rate than 0.5 (lr), or "
        'compute in float32 instead of bfloat16 (precision="float32").'
    )


def test_mean_reads_all_losses_so_far():
    taken = losses("cuda:0")
    for number in range(3):
        taken.add(number, 0.1, torch.tensor(float(number)))
    assert taken.mean() == 1.0
    taken.add(3, 0.1, torch.tensor(7.0))
    assert taken.mean() == 7.0
    taken.add(4, 0.1, torch.tensor(math.nan))
    with pytest.raises(NotFinite, match=r"at step 5 of 100"):
        taken.mean()


def test_not_finite_error_can_be_pickled():
    import pickle

    again = pickle.loads(pickle.dumps(NotFinite("so", step=3, lr=0.5)))
    assert (str(again), again.step, again.lr) == ("so", 3, 0.5)
