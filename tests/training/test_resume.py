"""An interrupted training resumes and ends with the same weights, bit for bit."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from depthfold.errors import CheckpointError, NotFinite
from depthfold.training.checkpoints import Checkpoints, load_weights
from depthfold.training.loop import train
from depthfold.training.recipe import Recipe
from depthfold.training.task import FunctionTask
from small_training import TASK, SmallNet, equal, failing_at, loss, score

RECIPE = Recipe(epochs=3, batch=8, lr=0.1, warmup=2, clip=1.0, checkpoint=4, evaluate=3)  # 12 steps
RECIPES = {
    "plain": RECIPE,
    "average": RECIPE.replace(ema=0.9),
    "bfloat16": RECIPE.replace(precision="bfloat16", ema=0.9, channels_last=True),
    "float16": RECIPE.replace(precision="float16"),
    "without momentum": RECIPE.replace(momentum=0, nesterov=False),
    "best": RECIPE.replace(keep="best", ema=0.5),
    "no interval": RECIPE.replace(checkpoint=None),
}
TESTS = Path(__file__).parent.parent


class Interruption(Exception):
    pass


def interrupt(step):
    raise Interruption


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_parts_in_evaluation_mode_stay_so_in_a_resumed_training(tmp_path):
    def model():
        small = SmallNet()
        small.norm.eval()
        return small

    whole, parts = model(), model()
    train(whole, TASK, RECIPE)
    with pytest.raises(Interruption):
        train(model(), failing_at(6, interrupt), RECIPE, folder=tmp_path)
    train(parts, TASK, RECIPE, folder=tmp_path)
    assert equal(whole, parts)
    assert parts.norm.num_batches_tracked.item() == 0


@pytest.mark.parametrize("name", RECIPES)
def test_interrupted_training_ends_with_the_same_weights(name, tmp_path):
    recipe = RECIPES[name]
    whole, parts = SmallNet(), SmallNet()
    expected = train(whole, TASK, recipe, folder=tmp_path / "whole")
    for at in (2, 5, 6, 11):  # the first before any checkpoint
        with pytest.raises(Interruption):
            train(SmallNet(), failing_at(at, interrupt), recipe, folder=tmp_path / "parts")
    found = train(parts, TASK, recipe, folder=tmp_path / "parts")
    assert equal(whole, parts)
    assert (found.curve, found.best, found.loss, found.score) == (
        expected.curve,
        expected.best,
        expected.loss,
        expected.score,
    )
    unkept = SmallNet()
    assert train(unkept, TASK, recipe).curve == expected.curve  # a folder changes nothing
    assert equal(whole, unkept)


def test_loss_scale_of_float16_is_restored(tmp_path):
    """It has come down from where it starts; a training that forgot it would leave out steps again."""

    def steep(m, step):
        if step.number == stop:
            raise Interruption
        return 100 * m(torch.full((2, 4), 10.0)).float().sum()

    recipe = Recipe(steps=12, lr=1e-6, precision="float16", checkpoint=4)
    task = FunctionTask(loss=steep, score=lambda m, split: 0.0)
    start = torch.nn.Linear(4, 1, bias=False)
    whole, cut, resumed = (copy.deepcopy(start) for _ in range(3))
    stop = None
    train(whole, task, recipe)
    stop = 10
    with pytest.raises(Interruption):
        train(cut, task, recipe, folder=tmp_path)
    stop = None
    train(resumed, task, recipe, folder=tmp_path)
    assert load_weights(cut, tmp_path).scale < 65536
    assert equal(whole, resumed)
    assert not equal(whole, start)


def test_resumed_training_takes_only_the_remaining_steps(tmp_path):
    with pytest.raises(Interruption):
        train(SmallNet(), failing_at(10, interrupt), RECIPE, folder=tmp_path)
    taken = []
    train(SmallNet(), _counting(taken), RECIPE, folder=tmp_path)
    assert min(taken) >= 8
    assert max(taken) == 11


def _counting(taken):
    def counted(model, step):
        taken.append(step.number)
        return loss(model, step)

    return FunctionTask(loss=counted, score=score, epoch_steps=4)


@pytest.mark.parametrize(("steps", "at", "left"), [(100, 99, 90), (25, 11, 9), (7, 6, 6)])
def test_recipe_without_an_interval_has_ten_checkpoints(steps, at, left, tmp_path):
    recipe = Recipe(steps=steps, batch=2)
    with pytest.raises(Interruption):
        train(SmallNet(), failing_at(at, interrupt), recipe, folder=tmp_path)
    taken = []
    whole, resumed = SmallNet(), SmallNet()
    found = train(resumed, _counting(taken), recipe, folder=tmp_path)
    assert taken == list(range(left, steps))
    expected = train(whole, TASK, recipe)
    assert equal(whole, resumed)
    assert (found.curve, found.loss) == (expected.curve, expected.loss)


def test_finished_training_is_only_read(tmp_path):
    first, again = SmallNet(), SmallNet()
    expected = train(first, TASK, RECIPE.replace(ema=0.9), folder=tmp_path)
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    task = FunctionTask(loss=_never, score=_never, epoch_steps=4)
    assert train(again, task, RECIPE.replace(ema=0.9), folder=tmp_path).curve == expected.curve
    assert equal(first, again)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == files


def _never(*_):
    raise AssertionError("taken again")


def test_metrics_have_every_line_once(tmp_path):
    def worse(model, split):  # at every score, so that none makes a checkpoint after it, and lines are ahead of it
        return -model.norm.num_batches_tracked.item()

    def task(at):
        return FunctionTask(loss=failing_at(at, interrupt).loss, score=worse, epoch_steps=4)

    train(SmallNet(), task(None), RECIPE, folder=tmp_path / "whole")
    for at in (7, 11):
        with pytest.raises(Interruption):
            train(SmallNet(), task(at), RECIPE, folder=tmp_path / "parts")
    assert [line["step"] for line in lines(tmp_path / "parts")] == [*range(1, 12)]
    state = load_weights(SmallNet(), tmp_path / "parts")
    assert (state.step, state.unscored) == (9, True)  # written before the score of step 9; three lines are ahead of it
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "ep')  # torn by a kill
    train(SmallNet(), task(None), RECIPE, folder=tmp_path / "parts")
    whole, parts = ([line | {"seconds": 0} for line in lines(tmp_path / each)] for each in ("whole", "parts"))
    assert parts == whole
    assert [line["step"] for line in whole] == [*range(1, 13)]
    assert [line["epoch"] for line in whole] == [step / 4 for step in range(1, 13)]
    assert [line["step"] for line in whole if line["score"] is not None] == [3, 6, 9, 12]
    seconds = [line["seconds"] for line in lines(tmp_path / "parts")]
    assert seconds == sorted(seconds)


def test_training_has_twenty_lines_and_more_if_they_would_be_over_fifty_steps_apart(tmp_path, monkeypatch):
    recipe = Recipe(steps=120, batch=2)
    train(SmallNet(), TASK, recipe, folder=tmp_path / "short")
    assert [line["step"] for line in lines(tmp_path / "short")] == sorted({*range(6, 121, 6), 50, 100})
    monkeypatch.setattr("depthfold.training.loop.LINES", 1)  # as if it were twenty times as long
    train(SmallNet(), TASK, recipe, folder=tmp_path / "long")
    assert [(line["step"], line["epoch"]) for line in lines(tmp_path / "long")] == [
        (50, None),
        (100, None),
        (120, None),
    ]


def test_last_and_best_weights_can_be_loaded(tmp_path):
    scores = iter([0.5, 0.9, 0.1, 0.2])
    seen = []

    def scoring(model, split):
        seen.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        return next(scores)

    trained = SmallNet()
    train(trained, FunctionTask(loss=loss, score=scoring, epoch_steps=4), RECIPE.replace(ema=0.9), folder=tmp_path)
    best, last = SmallNet(), SmallNet()
    assert load_weights(best, tmp_path, "best").best.score == 0.9
    load_weights(last, tmp_path)
    assert equal(last, trained)
    assert all(torch.equal(tensor, seen[1][name]) for name, tensor in best.state_dict().items())
    with pytest.raises(CheckpointError, match=r"are of another model: their names or shapes differ"):
        load_weights(torch.nn.Linear(2, 2), tmp_path)


def drawing(fails=None):
    """A score that draws random numbers, and fails the n-th time that it is asked."""
    asked = []

    def scoring(model, split):
        asked.append(1)
        if len(asked) == fails:
            raise Interruption
        return score(model, split) + 0.1 * torch.rand(()).item()

    return scoring


@pytest.mark.parametrize("fails", [1, 2, 3])
@pytest.mark.parametrize("checkpoint", [4, 12])
@pytest.mark.parametrize("keep", ["last", "best"])
def test_failed_score_does_not_lose_training_steps(keep, checkpoint, fails, tmp_path):
    recipe = RECIPE.replace(checkpoint=checkpoint, evaluate=4, ema=0.9, keep=keep)
    whole, resumed = SmallNet(), SmallNet()
    expected = train(whole, FunctionTask(loss=loss, score=drawing(), epoch_steps=4), recipe, folder=tmp_path / "whole")
    with pytest.raises(Interruption):
        task = FunctionTask(loss=loss, score=drawing(fails), epoch_steps=4)
        train(SmallNet(), task, recipe, folder=tmp_path / "parts")
    taken = []
    counting = FunctionTask(loss=_counting(taken).loss, score=drawing(), epoch_steps=4)
    found = train(resumed, counting, recipe, folder=tmp_path / "parts")
    assert taken == list(range(4 * fails, 12))  # at the end, nothing but the score is left
    assert equal(whole, resumed)
    assert (found.curve, found.best, found.score) == (expected.curve, expected.best, expected.score)
    lines_of = [[line | {"seconds": 0} for line in lines(tmp_path / each)] for each in ("whole", "parts")]
    assert lines_of[0] == lines_of[1]
    files = {path: path.read_bytes() for path in (tmp_path / "parts").iterdir()}
    train(SmallNet(), FunctionTask(loss=_never, score=_never, epoch_steps=4), recipe, folder=tmp_path / "parts")
    assert {path: path.read_bytes() for path in (tmp_path / "parts").iterdir()} == files


def test_interruption_between_the_last_line_and_the_last_checkpoint(tmp_path, monkeypatch):
    save = Checkpoints.save

    def interrupted(checkpoints, state, stepper):
        if state.curve and state.curve[-1].step == 12:
            raise Interruption
        save(checkpoints, state, stepper)

    monkeypatch.setattr(Checkpoints, "save", interrupted)
    with pytest.raises(Interruption):
        train(SmallNet(), TASK, RECIPE, folder=tmp_path)
    monkeypatch.undo()
    assert [line["step"] for line in lines(tmp_path)][-1] == 12
    train(SmallNet(), FunctionTask(loss=_never, score=score, epoch_steps=4), RECIPE, folder=tmp_path)
    assert [line["step"] for line in lines(tmp_path)] == [*range(1, 13)]


SCRIPT = """
    import os, signal, sys
    import torch
    torch.set_num_threads(1)
    sys.path[:0] = [{tests!r}]
    from small_training import TASK, SmallNet, failing_at
    import safetensors.torch
    from depthfold.training.loop import train
    from depthfold.training.recipe import Recipe

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    save, saved = safetensors.torch.save_file, []

    def half(tensors, path, metadata):  # the last checkpoint of the third step that has one dies half-way
        save(tensors, path, metadata)
        saved.append(path)
        if len(saved) == 5:
            with open(path, "r+b") as file:
                file.truncate(os.path.getsize(path) // 2)
            die()

    how, folder, recipe = sys.argv[1:]
    if how == "write":
        safetensors.torch.save_file = half
    task = failing_at(10, die) if how == "step" else TASK
    train(SmallNet(), task, Recipe.loads(recipe), folder=folder)
"""


@pytest.mark.parametrize("how", ["step", "write"])
def test_training_killed_in_a_step_or_while_writing_resumes(how, tmp_path):
    recipe = RECIPES["bfloat16"]
    script = textwrap.dedent(SCRIPT.format(tests=str(TESTS)))
    command = [sys.executable, "-c", script, how, str(tmp_path / "run"), recipe.dumps()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (tmp_path / "run" / "last.safetensors").exists()
    assert (tmp_path / "run" / "last.safetensors.partial").exists() == (how == "write")
    whole, resumed = SmallNet(), SmallNet()
    train(whole, TASK, recipe)
    train(resumed, TASK, recipe, folder=tmp_path / "run")
    assert equal(whole, resumed)


def test_non_finite_weights_leave_the_last_good_checkpoint(tmp_path):
    def breaking(model, step):
        value = loss(model, step)
        # The loss is finite, but not its gradient. A checkpoint is due after this step.
        return value + (model.mix.bias.sum() * 0).sqrt() if step.number == 7 else value

    with pytest.raises(NotFinite, match=r"The weights are not finite after step 8 of 12"):
        train(SmallNet(), FunctionTask(loss=breaking, score=score, epoch_steps=4), RECIPE, folder=tmp_path)
    whole, resumed = SmallNet(), SmallNet()
    assert load_weights(SmallNet(), tmp_path).step < 8
    train(resumed, TASK, RECIPE, folder=tmp_path)
    train(whole, TASK, RECIPE)
    assert equal(whole, resumed)


def test_full_disk_leaves_the_previous_checkpoint(tmp_path, monkeypatch):
    real = os.fsync
    calls = []

    def full(handle):
        calls.append(handle)
        if len(calls) == 8:
            raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr("depthfold.store.files.os.fsync", full)
    with pytest.raises(CheckpointError, match=r"safetensors cannot be written: .*No space left on device. Check the"):
        train(SmallNet(), TASK, RECIPE, folder=tmp_path)
    monkeypatch.undo()
    whole, resumed = SmallNet(), SmallNet()
    train(resumed, TASK, RECIPE, folder=tmp_path)
    train(whole, TASK, RECIPE)
    assert equal(whole, resumed)
