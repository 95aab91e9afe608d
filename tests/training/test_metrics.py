"""TensorBoard, where it is asked for."""

from __future__ import annotations

import sys

import pytest

from depthfold.errors import MissingDependency
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
    assert [event.step for event in board.Scalars("loss")] == [2, 4, 6]


def test_tensorboard_is_not_imported_unless_it_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    train(SmallNet(), TASK, RECIPE, folder=tmp_path / "without")
    assert not (tmp_path / "without" / "tensorboard").exists()
    with pytest.raises(MissingDependency, match=r"Install it with: pip install depthfold\[tensorboard\]"):
        train(SmallNet(), TASK, RECIPE, folder=tmp_path / "with", tensorboard=True)
