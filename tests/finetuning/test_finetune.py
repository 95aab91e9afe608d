"""finetune() trains a copy of the student that can be merged."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import depthfold as df
from depthfold.errors import CheckpointError, InvalidValue
from depthfold.finetuning import finetune, finetuned
from depthfold.training import FunctionTask, Recipe, preset, train
from depthfold.training.checkpoints import read_checkpoint, write_checkpoint
from small_training import TASK, SmallNet, equal

RECIPE = Recipe(steps=8, batch=8, lr=0.05, evaluate=4, checkpoint=4)


class Original(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
            *(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
            *(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
        )
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


@pytest.fixture
def model():
    torch.manual_seed(1)
    return Original()


INPUTS = torch.zeros(1, 2, 5, 5)


@pytest.mark.parametrize("at", [None, "body"])
def test_trained_student_can_be_merged(model, at):
    traced = df.trace(model, INPUTS, at=at) if at else df.trace(model, INPUTS)
    student = df.rewrite(traced, df.Plan((2,), (2,)))
    before = copy.deepcopy(student)
    trained = finetune(student, TASK, RECIPE, teacher=model)
    assert equal(student, before)
    assert not equal(trained, before)
    shallow = df.merge(trained)
    x = torch.randn(4, 2, 5, 5)
    assert torch.allclose(shallow.eval()(x), trained.eval()(x), atol=1e-4)
    assert sum(isinstance(module, nn.Conv2d) for module in shallow.modules()) == 2


def test_surrounding_inference_mode_changes_nothing(model):
    traced, plan = df.trace(model, INPUTS), df.Plan((2,), (2,))
    expected = finetune(df.rewrite(traced, plan), TASK, RECIPE, teacher=model)
    with torch.inference_mode():
        student = df.rewrite(traced, plan)
        trained = finetune(student, TASK, RECIPE, teacher=model)
    assert equal(trained, expected)
    train(student, TASK, RECIPE, teacher=model)  # a student of inference tensors could not be trained
    assert equal(student, expected)


@pytest.mark.parametrize("at", [None, "body"])
def test_frozen_parts_do_not_change(model, at):
    frozen = model.body[1].eval().requires_grad_(False)
    torch.nn.init.uniform_(frozen.running_mean)
    traced = df.trace(model, INPUTS, at=at)
    trained = finetune(df.rewrite(traced, traced.vanilla), TASK, RECIPE, teacher=model)
    found = trained.get_submodule("body.1")
    assert not found.training
    assert not any(parameter.requires_grad for parameter in found.parameters())
    assert equal(found, frozen)
    assert trained.get_submodule("body.4").num_batches_tracked.item() == 8


def test_finetune_equals_train_on_a_copy():
    student, expected = SmallNet().eval(), SmallNet()
    trained = finetune(student, TASK, RECIPE)
    train(expected, TASK, RECIPE)
    assert equal(trained, expected)
    assert equal(student, SmallNet())
    assert not trained.training
    assert all(p.grad is None for p in student.parameters())


def test_student_can_be_its_own_teacher():
    student = SmallNet()
    assert not equal(finetune(student, TASK, RECIPE, teacher=student), finetune(student, TASK, RECIPE))
    assert equal(student, SmallNet())
    assert student.training


def test_finetuning_improves_the_score(model):
    """The score is measured on data that was not trained on."""
    true = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))

    def draw(generator):
        x = torch.randn(32, 2, 5, 5, generator=generator)
        return x, (x.mean((2, 3)) @ true).argmax(1)

    def loss(net, step):
        x, y = draw(step.generator("batch"))
        return F.cross_entropy(net(x), y)

    def score(net, split):
        x, y = draw(torch.Generator().manual_seed(99))
        return (net(x).argmax(1) == y).float().mean().item()

    task = FunctionTask(loss=loss, score=score)
    student = df.rewrite(df.trace(model, INPUTS), df.Plan((2,), (2,)))
    trained = finetune(student, task, Recipe(steps=60, batch=32, lr=0.1))
    assert score(trained.eval(), "holdout") > score(student.eval(), "holdout") + 0.2


def test_run_folder_is_written_and_reused(model, tmp_path):
    first = finetune(SmallNet(), TASK, RECIPE, run=tmp_path)
    names = {path.name for path in (tmp_path / "finetuning").iterdir()}
    assert names == {"last.safetensors", "best.safetensors", "metrics.jsonl"}
    never = FunctionTask(loss=_never, score=_never)
    assert equal(first, finetune(SmallNet(), never, RECIPE, run=tmp_path))


def _never(*_):
    raise AssertionError("trained again")


def test_run_of_another_plan_is_refused(model, tmp_path):
    traced = df.trace(model, INPUTS)
    one, two = (df.rewrite(traced, df.Plan(cuts, cuts)) for cuts in ((1,), (2,)))
    assert one.state_dict().keys() == two.state_dict().keys()  # only the graphs differ
    finetune(one, TASK, RECIPE, run=tmp_path)
    with pytest.raises(CheckpointError, match=r"model: network \w+, plan .*\[1\].* there, .*\[2\].* here"):
        finetune(two, TASK, RECIPE, run=tmp_path)


def test_run_of_another_task_or_teacher_is_refused(model, tmp_path):
    student = df.rewrite(df.trace(model, INPUTS), df.Plan((2,), (2,)))
    finetune(student, TASK, RECIPE, teacher=model, run=tmp_path)
    with pytest.raises(CheckpointError, match=r"teacher: Original \w+ there, none here\)\. Use another folder"):
        finetune(student, TASK, RECIPE, run=tmp_path)
    images, labels = torch.zeros(8, 2, 5, 5), torch.tensor([0, 1] * 4)
    other = df.ClassificationTask.tensors(train=(images, labels))
    with pytest.raises(CheckpointError, match=r"task: FunctionTask there, 8 images in memory, .* here\)\. U"):
        finetune(student, other, RECIPE, teacher=model, run=tmp_path)


def test_checkpoint_of_another_version_is_refused(tmp_path):
    finetune(SmallNet(), TASK, RECIPE, run=tmp_path)
    path = tmp_path / "finetuning" / "last.safetensors"
    document, tensors = read_checkpoint(path)
    assert equal(finetuned(SmallNet(), tmp_path), finetune(SmallNet(), TASK, RECIPE))
    write_checkpoint(path, document.replace('"version": 3', '"version": 1', 1), tensors)
    with pytest.raises(
        CheckpointError, match=r"version 1; State reads .*, version 3\. .* the version of depthfold that wrote it"
    ):
        finetuned(SmallNet(), tmp_path)


def test_recipe_can_be_given_by_name(tmp_path):
    calls = []

    def progress(what, total, done):
        calls.append((what, total, done))
        return _stop

    with pytest.raises(KeyboardInterrupt):  # after the first step
        finetune(SmallNet(), TASK, "quick", progress=progress)
    assert calls == [("steps", preset("quick").steps, 0)]
    with pytest.raises(InvalidValue, match=r"There is no recipe 'quik'. Did you mean 'quick'\?"):
        finetune(SmallNet(), TASK, "quik")


def _stop():
    raise KeyboardInterrupt


def test_best_weights_are_kept_if_the_recipe_says_so(tmp_path):
    def scored():
        values = iter([0.9, 0.1])
        return FunctionTask(loss=TASK.loss, score=lambda model, split: next(values))

    last = finetune(SmallNet(), scored(), RECIPE)
    best = finetune(SmallNet(), scored(), RECIPE.replace(keep="best"))
    kept = finetune(SmallNet(), scored(), RECIPE.replace(keep="best"), run=tmp_path)
    assert equal(best, kept)
    assert not equal(best, last)
    assert best.norm.num_batches_tracked.item() == 4


@pytest.mark.parametrize("keep", ["last", "best"])
def test_finished_training_without_the_last_score(keep, tmp_path):
    def fails(model, split):
        raise OSError("the disk is gone")

    recipe = RECIPE.replace(keep=keep, evaluate=None)
    with pytest.raises(OSError, match="the disk is gone"):
        finetune(SmallNet(), FunctionTask(loss=TASK.loss, score=fails), recipe, run=tmp_path)
    if keep == "best":
        with pytest.raises(
            CheckpointError, match=r"has all 8 steps but not the last score, so the best weights are unknown"
        ):
            finetuned(SmallNet(), tmp_path)
    else:  # the last weights do not depend on the score
        assert equal(finetuned(SmallNet(), tmp_path), finetune(SmallNet(), TASK, recipe))
    scored = finetune(SmallNet(), FunctionTask(loss=_never, score=TASK.score), recipe, run=tmp_path)
    assert equal(scored, finetuned(SmallNet(), tmp_path))


def test_task_without_holdout_is_trained_without_scores(model, tmp_path):
    generator = torch.Generator().manual_seed(0)
    pair = torch.randn(24, 2, 5, 5, generator=generator), torch.arange(24) % 3
    task = df.ClassificationTask.tensors(train=pair, holdout=0)
    trained = finetune(model, task, RECIPE, run=tmp_path)
    expected = copy.deepcopy(model)
    train(expected, task, RECIPE, split=None)
    assert equal(trained, expected)
    assert equal(finetuned(model, tmp_path), trained)
    assert not equal(trained, model)


def test_keep_best_without_scores_is_refused_before_the_first_step(model, tmp_path):
    task = df.ClassificationTask.tensors(train=(torch.zeros(6, 2, 5, 5), torch.arange(6) % 3), holdout=0)
    with pytest.raises(InvalidValue) as caught:
        finetune(model, task, RECIPE.replace(keep="best"), run=tmp_path / "run")
    assert str(caught.value) == (
        'The recipe keeps the weights of the best score (keep="best"), but there is no hold-out set to score on. Give '
        'the task one (for example holdout=0.1), or use recipe.replace(keep="last").'
    )
    assert not (tmp_path / "run").exists()


def test_wrong_arguments_are_refused():
    text = r"^finetune\(\) takes an nn\.Module, found str\. Pass the result of rewrite\(\)\.$"
    with pytest.raises(InvalidValue, match=text):
        finetune("student", TASK)
    text = r"^The run folder must be a path, found 5. Pass a string or a pathlib.Path.$"
    for call in (lambda: finetune(SmallNet(), TASK, run=5), lambda: finetuned(SmallNet(), 5)):
        with pytest.raises(InvalidValue, match=text):
            call()


class Guided(Original):
    def forward(self, x, *, guide):
        return super().forward(x * guide)


def test_a_teacher_with_several_inputs_is_called_as_the_model():
    guide = torch.rand(8, 1, 5, 5)

    def loss(model, step):
        x = torch.randn(8, 2, 5, 5, generator=step.generator())
        outputs = model(x, guide=guide)
        return F.mse_loss(outputs, step.teacher(x, guide=guide)) if step.teacher else outputs.square().mean()

    task = FunctionTask(loss=loss, score=lambda model, split: -model(torch.ones(8, 2, 5, 5), guide=guide).std().item())
    model = Guided().eval()
    traced = df.trace(model, {"x": torch.zeros(1, 2, 5, 5), "guide": torch.zeros(1, 1, 5, 5)})
    recipe = Recipe(steps=2, batch=8)
    assert df.merge(finetune(df.rewrite(traced, df.Plan((2,), (2,))), task, recipe, teacher=model))
    assert df.measure_importance(traced, task, recipe, method="brief").importances
