"""A training run that is killed resumes to the same weights, bit for bit; the folder of another run is refused."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from depthfold.errors import CheckpointError, InvalidValue, NotFinite
from depthfold.training.checkpoints import Checkpoints, load_weights, read_checkpoint, write_checkpoint
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


def test_what_is_in_evaluation_mode_stays_so_in_a_training_that_goes_on(tmp_path):
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
def test_an_interrupted_training_ends_with_the_same_weights(name, tmp_path):
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


def test_the_scale_of_float16_is_kept(tmp_path):
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


def test_a_resumed_training_takes_only_the_steps_that_are_left(tmp_path):
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
def test_a_recipe_without_an_interval_has_ten_checkpoints(steps, at, left, tmp_path):
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


def test_a_finished_training_is_only_read(tmp_path):
    first, again = SmallNet(), SmallNet()
    expected = train(first, TASK, RECIPE.replace(ema=0.9), folder=tmp_path)
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    task = FunctionTask(loss=_never, score=_never, epoch_steps=4)
    assert train(again, task, RECIPE.replace(ema=0.9), folder=tmp_path).curve == expected.curve
    assert equal(first, again)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == files


def _never(*_):
    raise AssertionError("taken again")


def test_the_metrics_have_every_line_once(tmp_path):
    def worse(model, split):  # at every score, so that none makes a checkpoint after it, and lines are ahead of it
        return -model.norm.num_batches_tracked.item()

    def task(at):
        return FunctionTask(loss=failing_at(at, interrupt).loss, score=worse, epoch_steps=4)

    train(SmallNet(), task(None), RECIPE, folder=tmp_path / "whole")
    for at in (7, 11):
        with pytest.raises(Interruption):
            train(SmallNet(), task(at), RECIPE, folder=tmp_path / "parts")
    assert [line["step"] for line in lines(tmp_path / "parts")] == [3, 4, 6, 8, 9]
    state = load_weights(SmallNet(), tmp_path / "parts")
    assert (state.step, state.unscored) == (9, True)  # written before the score of step 9, whose line is there
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "ep')  # torn by a kill
    train(SmallNet(), task(None), RECIPE, folder=tmp_path / "parts")
    whole, parts = ([line | {"seconds": 0} for line in lines(tmp_path / each)] for each in ("whole", "parts"))
    assert parts == whole
    assert [line["step"] for line in whole] == [3, 4, 6, 8, 9, 12]
    assert [line["epoch"] for line in whole] == [0.75, 1.0, 1.5, 2.0, 2.25, 3.0]
    assert [line["score"] is None for line in whole] == [False, True, False, True, False, False]
    seconds = [line["seconds"] for line in lines(tmp_path / "parts")]
    assert seconds == sorted(seconds)


def test_long_trainings_have_a_line_every_fifty_steps(tmp_path):
    recipe = Recipe(steps=120, batch=2)
    train(SmallNet(), TASK, recipe, folder=tmp_path)
    assert [(line["step"], line["epoch"]) for line in lines(tmp_path)] == [(50, None), (100, None), (120, None)]


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
def test_a_score_that_fails_does_not_cost_the_steps_before_it(keep, checkpoint, fails, tmp_path):
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


def test_interrupted_between_the_last_line_and_the_last_checkpoint(tmp_path, monkeypatch):
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
    assert [line["step"] for line in lines(tmp_path)] == [3, 4, 6, 8, 9, 12]


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
def test_killed_in_a_step_or_while_writing_it_goes_on(how, tmp_path):
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
def test_the_folder_of_another_training_is_refused(difference, tmp_path):
    given = dict(model=SmallNet(), task=TASK, recipe=RECIPE, about="plan A", teacher=SmallNet(seed=2), folder=tmp_path)
    train(**given)
    with pytest.raises(CheckpointError) as caught:
        train(**given | dict(model=SmallNet()) | OTHERS[difference])
    digests = dict.fromkeys(re.findall(r"[0-9a-f]{16}", str(caught.value)))
    message = str(caught.value)
    for digest, letter in zip(digests, "ABCD", strict=False):  # two that are equal have the same letter
        message = message.replace(digest, letter)
    assert message == (
        f"The folder {tmp_path} holds another training run ({difference}). Use another folder, or delete it to start "
        "again."
    )


def test_the_functions_of_a_task_with_a_name_may_change(tmp_path):
    given = dict(recipe=RECIPE, folder=tmp_path)
    train(SmallNet(), named("one"), **given)
    train(SmallNet(), FunctionTask(loss=_never, score=_never, epoch_steps=4, identity="one"), **given)
    with pytest.raises(CheckpointError, match="task: one there, FunctionTask here"):
        train(SmallNet(), TASK, **given)
    with pytest.raises(InvalidValue, match=r"^The identity of a task must be text, found 5\.$"):
        named(5)


def test_the_same_teacher_is_the_same_training(tmp_path):
    """Whatever mode it is in, and however often it was made: what it computes as a teacher counts."""
    first, again = SmallNet(), SmallNet()
    train(first, TASK, RECIPE, teacher=SmallNet(seed=2), folder=tmp_path)
    never = FunctionTask(loss=_never, score=_never, epoch_steps=4)
    train(again, never, RECIPE, teacher=SmallNet(seed=2).eval().requires_grad_(False), folder=tmp_path)
    assert equal(first, again)


def of_before(folder):
    """The checkpoint as the first version wrote it: without task and teacher."""
    for path in folder.glob("*.safetensors"):
        document, tensors = read_checkpoint(path)
        found = json.loads(document) | {"version": 1}
        del found["identity"]["task"], found["identity"]["teacher"]
        write_checkpoint(path, json.dumps(found), tensors)


def test_a_folder_of_the_first_version_is_refused(tmp_path):
    train(SmallNet(), TASK, RECIPE, folder=tmp_path)
    of_before(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        train(SmallNet(), TASK, RECIPE, folder=tmp_path)
    assert str(caught.value) == (
        f"The checkpoint {tmp_path / 'last.safetensors'} cannot be read: This document has format "
        "'depthfold.checkpoint', version 1; State reads format 'depthfold.checkpoint', version 3. Read it with the "
        "command and the version of depthfold that wrote it. Otherwise use another folder, or delete it to start again."
    )


def test_a_folder_in_use_is_refused(tmp_path):
    def second(step):
        train(SmallNet(), TASK, RECIPE, folder=tmp_path)

    with pytest.raises(CheckpointError, match=r"is in use by another process. Wait for it, or use another"):
        train(SmallNet(), failing_at(3, second), RECIPE, folder=tmp_path)
    train(SmallNet(), TASK, RECIPE, folder=tmp_path)  # the lock has gone with its holder


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/run cannot be written: Not a directory. Use another folder.$"):
        train(SmallNet(), TASK, RECIPE, folder=tmp_path / "file" / "run")


def test_numbers_that_are_not_finite_leave_the_last_good_checkpoint(tmp_path):
    def breaking(model, step):
        value = loss(model, step)
        # Finite, but not its gradient: the weights are spoilt in the very step after which a checkpoint is due.
        return value + (model.mix.bias.sum() * 0).sqrt() if step.number == 7 else value

    with pytest.raises(NotFinite, match=r"The weights are not finite after step 8 of 12"):
        train(SmallNet(), FunctionTask(loss=breaking, score=score, epoch_steps=4), RECIPE, folder=tmp_path)
    whole, resumed = SmallNet(), SmallNet()
    assert load_weights(SmallNet(), tmp_path).step < 8
    train(resumed, TASK, RECIPE, folder=tmp_path)
    train(whole, TASK, RECIPE)
    assert equal(whole, resumed)


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, monkeypatch):
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
