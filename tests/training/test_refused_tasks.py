"""Invalid tasks are refused before anything is trained, and a task may use autocast."""

import numpy as np
import pytest
import torch

import depthfold as df
from depthfold.errors import InvalidValue
from depthfold.jobs import Processes
from depthfold.training import FunctionTask, train
from small_training import SmallNet, loss
from tiny_importance import Tiny

RECIPE = df.Recipe(steps=2, batch=4, lr=0.01)


@pytest.mark.parametrize("seed", [None, 1.5, "0", -1])
def test_seed_of_a_split_must_be_a_whole_number(seed):
    with pytest.raises(InvalidValue, match="The seed of a task must be an integer of at least 0"):
        _task(seed=seed)


def test_equal_seeds_of_different_types_give_the_same_split():
    one, two = _task(seed=3), _task(seed=np.int64(3))
    assert one.identity == two.identity
    labels = [task._data.cached("holdout").labels.tolist() for task in (one, two)]
    assert labels[0] == labels[1]


def _task(**options):
    random = torch.Generator().manual_seed(0)
    images, labels = torch.rand(40, 1, 4, 4, generator=random), torch.arange(40) % 4
    return df.ClassificationTask.tensors(train=(images, labels), test=(images, labels), holdout=0.5, **options)


def test_function_task_with_wrong_arguments_is_refused():
    with pytest.raises(InvalidValue, match="The score of a task must be a function, found 6"):
        FunctionTask(loss=loss, score=6)
    with pytest.raises(InvalidValue, match="epoch_steps must be an integer"):
        FunctionTask(loss=loss, score=lambda *_: 0.0, epoch_steps="x")


@pytest.mark.parametrize(
    ("score", "found"),
    [(None, "NoneType"), (torch.zeros(3), r"a tensor of shape \(3,\)"), ("0.5", "str"), ([1], "list")],
)
def test_score_that_is_not_a_number_is_refused(score, found):
    with pytest.raises(
        InvalidValue, match=rf"The task's score must be a single number, higher for a better model, found {found}\.$"
    ):
        train(SmallNet(), FunctionTask(loss=loss, score=lambda *_: score), RECIPE)


@pytest.mark.parametrize("score", [1, torch.tensor(0.5), torch.tensor([0.5]), np.float32(0.5)])
def test_score_that_is_a_number_is_accepted(score):
    assert train(SmallNet(), FunctionTask(loss=loss, score=lambda *_: score), RECIPE).score == float(score)


def test_identity_that_is_a_method_is_refused():
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


def test_devices_must_be_given_by_name():
    with pytest.raises(InvalidValue, match="or different GPUs"):
        Processes(devices=(torch.device("cuda:0"),))


def test_importances_need_a_holdout_set():
    task = _task()
    without = df.ClassificationTask(source=task.source, holdout=0)
    with pytest.raises(InvalidValue, match=r"but this task has none\. Give it one, for example holdout=0\.1"):
        df.measure_importance(df.trace(Tiny(), torch.zeros(1, 2, 6, 6)), without, RECIPE)


def test_autocast_in_a_task_uses_the_current_weights():
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
