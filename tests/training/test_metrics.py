"""The metrics of a training run: its curve, and TensorBoard, where it is asked for."""

from __future__ import annotations

import sys
from statistics import fmean

import pytest

from depthfold.errors import MissingDependency
from depthfold.training import FunctionTask, read_curve
from depthfold.training.loop import train
from depthfold.training.recipe import Recipe
from small_training import TASK, SmallNet, failing_at

RECIPE = Recipe(steps=6, batch=4, evaluate=2, checkpoint=2)


def stop(step):
    raise KeyboardInterrupt


def test_tensorboard_shows_every_step_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with pytest.raises(KeyboardInterrupt):
        train(SmallNet(), failing_at(3, stop), RECIPE, folder=tmp_path, tensorboard=True)
    trained = train(SmallNet(), TASK, RECIPE, folder=tmp_path, tensorboard=True)
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    found = [(event.step, event.value) for event in board.Scalars("score")]
    assert found == [(point.step, pytest.approx(point.score)) for point in trained.curve]
    assert [event.step for event in board.Scalars("loss")] == [1, 2, 3, 4, 5, 6]


def test_short_training_has_a_curve_with_the_losses_of_its_steps(tmp_path):
    losses = []

    def recorded(model, step):
        value = TASK.loss(model, step)
        losses.append(value.item())
        return value

    task = FunctionTask(loss=recorded, score=TASK.score, epoch_steps=4)
    recipe = Recipe(steps=45, batch=4, checkpoint=30)
    trained = train(SmallNet(), task, recipe, split=None, folder=tmp_path)
    curve = read_curve(tmp_path)
    assert [line["step"] for line in curve] == [*range(2, 45, 2), 45]
    between = [line for line in curve if line["step"] not in (30, 45)]
    for line in between:
        assert line["loss"] == pytest.approx(fmean(losses[line["step"] - 2 : line["step"]]))
    # A checkpoint that the recipe asks for ends a mean, with and without a folder.
    assert curve[14]["loss"] == pytest.approx(fmean(losses[:30]))
    assert curve[-1]["loss"] == trained.loss == pytest.approx(fmean(losses[30:]))
    assert train(SmallNet(), TASK, recipe, split=None).loss == trained.loss
    assert read_curve(tmp_path / "elsewhere") == ()


def test_tensorboard_is_not_imported_unless_it_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    train(SmallNet(), TASK, RECIPE, folder=tmp_path / "without")
    assert not (tmp_path / "without" / "tensorboard").exists()
    with pytest.raises(MissingDependency, match=r"In a clone of depthfold, run: pip install -e .\.\[tensorboard\]."):
        train(SmallNet(), TASK, RECIPE, folder=tmp_path / "with", tensorboard=True)
