"""The folder of a training is refused if it belongs to another training, is in use, or cannot be made."""

from __future__ import annotations

import json
import re

import pytest
import torch

from depthfold.errors import CheckpointError, InvalidValue
from depthfold.training.checkpoints import read_checkpoint, write_checkpoint
from depthfold.training.loop import train
from depthfold.training.recipe import Recipe
from depthfold.training.task import FunctionTask
from small_training import TASK, SmallNet, equal, failing_at, loss, score

RECIPE = Recipe(epochs=3, batch=8, lr=0.1, warmup=2, clip=1.0, checkpoint=4, evaluate=3)  # 12 steps


def _never(*_):
    raise AssertionError("taken again")


def named(identity):
    return FunctionTask(loss=loss, score=score, epoch_steps=4, identity=identity)


class Other(SmallNet):
    """The same weights in another class."""


OTHERS = {
    "recipe.lr: 0.1 there, 0.2 here": dict(recipe=RECIPE.replace(lr=0.2)),
    "seed: 0 there, 5 here": dict(seed=5),
    "weights: A there, B here": dict(model=SmallNet(seed=1)),
    "shapes: A there, B here; weights: C there, D here": dict(model=torch.nn.Sequential(SmallNet())),
    "model: plan A there, plan B here": dict(about="plan B"),
    "split: holdout there, test here": dict(split="test"),
    "steps: 12 there, 15 here": dict(task=FunctionTask(loss=loss, score=score, epoch_steps=5)),
    "task: FunctionTask there, another here": dict(task=named("another")),
    "teacher: SmallNet A there, SmallNet B here": dict(teacher=SmallNet(seed=3)),
    "teacher: SmallNet A there, none here": dict(teacher=None),
    "teacher: SmallNet A there, Other B here": dict(teacher=Other(seed=2)),
}


@pytest.mark.parametrize("difference", OTHERS)
def test_folder_of_another_training_is_refused(difference, tmp_path):
    given = dict(model=SmallNet(), task=TASK, recipe=RECIPE, about="plan A", teacher=SmallNet(seed=2), folder=tmp_path)
    train(**given)
    with pytest.raises(CheckpointError) as caught:
        train(**given | dict(model=SmallNet()) | OTHERS[difference])
    digests = dict.fromkeys(re.findall(r"[0-9a-f]{16}", str(caught.value)))
    message = str(caught.value)
    for digest, letter in zip(digests, "ABCD", strict=False):  # equal digests get the same letter
        message = message.replace(digest, letter)
    assert message == (
        f"The folder {tmp_path} holds another training run ({difference}). Use another folder, or delete it to start "
        "again."
    )


def test_functions_of_a_task_with_an_identity_may_change(tmp_path):
    given = dict(recipe=RECIPE, folder=tmp_path)
    train(SmallNet(), named("one"), **given)
    train(SmallNet(), FunctionTask(loss=_never, score=_never, epoch_steps=4, identity="one"), **given)
    with pytest.raises(CheckpointError, match="task: one there, FunctionTask here"):
        train(SmallNet(), TASK, **given)
    with pytest.raises(InvalidValue, match=r"^The identity of a task must be text, found 5\.$"):
        named(5)


def test_equal_teacher_is_the_same_training(tmp_path):
    """The mode of the teacher and frozen parameters do not matter."""
    first, again = SmallNet(), SmallNet()
    train(first, TASK, RECIPE, teacher=SmallNet(seed=2), folder=tmp_path)
    never = FunctionTask(loss=_never, score=_never, epoch_steps=4)
    train(again, never, RECIPE, teacher=SmallNet(seed=2).eval().requires_grad_(False), folder=tmp_path)
    assert equal(first, again)


def rewrite_as_first_version(folder):
    """Rewrite the checkpoints in the first version of their format, without task and teacher."""
    for path in folder.glob("*.safetensors"):
        document, tensors = read_checkpoint(path)
        found = json.loads(document) | {"version": 1}
        del found["identity"]["task"], found["identity"]["teacher"]
        write_checkpoint(path, json.dumps(found), tensors)


def test_folder_of_the_first_version_is_refused(tmp_path):
    train(SmallNet(), TASK, RECIPE, folder=tmp_path)
    rewrite_as_first_version(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        train(SmallNet(), TASK, RECIPE, folder=tmp_path)
    assert str(caught.value) == (
        f"The checkpoint {tmp_path / 'last.safetensors'} cannot be read: This document has format "
        "'depthfold.checkpoint', version 1; State reads format 'depthfold.checkpoint', version 3. Read it with the "
        "command and the version of depthfold that wrote it. Otherwise use another folder, or delete it to start again."
    )


def test_folder_in_use_is_refused(tmp_path):
    def second(step):
        train(SmallNet(), TASK, RECIPE, folder=tmp_path)

    with pytest.raises(CheckpointError, match=r"is in use by another process. Wait for it, or use another"):
        train(SmallNet(), failing_at(3, second), RECIPE, folder=tmp_path)
    train(SmallNet(), TASK, RECIPE, folder=tmp_path)  # the lock was released


def test_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/run cannot be written: Not a directory. Use another folder.$"):
        train(SmallNet(), TASK, RECIPE, folder=tmp_path / "file" / "run")
