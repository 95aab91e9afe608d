"""Tasks that make no sense are refused in a sentence, before anything is trained; an autocast of a task's own works."""

import numpy as np
import pytest
import torch

import depthfold as df
from depthfold.errors import InvalidValue
from depthfold.jobs import Processes
from depthfold.training.loop import train
from depthfold.training.task import FunctionTask
from small_training import SmallNet, loss
from tiny_importance import Tiny

RECIPE = df.Recipe(steps=2, batch=4, lr=0.01)


@pytest.mark.parametrize("seed", [None, 1.5, "0", -1])
def test_the_seed_of_a_split_is_a_whole_number(seed):
    with pytest.raises(InvalidValue, match="The seed of a task must be an integer of at least 0"):
        _task(seed=seed)


def test_seeds_that_look_alike_are_alike():
    one, two = _task(seed=3), _task(seed=np.int64(3))
    assert one.identity == two.identity
    labels = [task._data.scored("holdout").labels.tolist() for task in (one, two)]
    assert labels[0] == labels[1]


def _task(**options):
    random = torch.Generator().manual_seed(0)
    images, labels = torch.rand(40, 1, 4, 4, generator=random), torch.arange(40) % 4
    return df.ClassificationTask.tensors(train=(images, labels), test=(images, labels), holdout=0.5, **options)


def test_functions_that_are_none():
    with pytest.raises(InvalidValue, match="The score of a task is a function, found 6"):
        FunctionTask(loss=loss, score=6)
    with pytest.raises(InvalidValue, match="The steps of an epoch must be an integer"):
        FunctionTask(loss=loss, score=lambda *_: 0.0, epoch="x")


@pytest.mark.parametrize("score", [None, torch.zeros(3)])
def test_a_score_that_is_no_number(score):
    with pytest.raises(InvalidValue, match="The task's score must be one number, higher for a better model, found"):
        train(SmallNet(), FunctionTask(loss=loss, score=lambda *_: score), RECIPE)


def test_an_identity_that_is_a_method():
    class Mine:
        def loss(self, model, step):
            return loss(model, step)

        def score(self, model, split):
            return 0.0

        def steps_per_epoch(self, recipe):
            return 4

        def identity(self):
            return "mine"

    with pytest.raises(InvalidValue, match=r"The identity of a task \(Mine.identity\) must be text"):
        train(SmallNet(), Mine(), RECIPE)


def test_devices_are_given_by_name():
    with pytest.raises(InvalidValue, match="or different GPUs"):
        Processes(devices=(torch.device("cuda:0"),))


def test_importances_need_a_hold_out():
    task = _task()
    without = df.ClassificationTask(source=task.source, holdout=0)
    with pytest.raises(InvalidValue, match=r"this task holds out nothing\. Give it one: holdout=0\.1"):
        df.measure_importance(df.trace(Tiny(), torch.zeros(1, 2, 6, 6)), without, RECIPE)


def test_an_autocast_of_the_tasks_own_sees_the_weights_as_they_are():
    seen = []

    def score(model, split):
        x = torch.ones(2, 2, 5, 5)
        for factor in (1.0, 2.0):
            with torch.no_grad():
                model.conv.weight.mul_(factor)
            with torch.enable_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                seen.append(model.conv(x).float().sum().item())
        return 0.0

    train(SmallNet(), FunctionTask(loss=loss, score=score), RECIPE)
    assert seen[1] == pytest.approx(2 * seen[0], rel=0.02)
