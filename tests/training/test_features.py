"""Matching the features of a teacher: against a plain loop, with dropout, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from depthfold.errors import InvalidValue
from depthfold.training import FunctionTask, Recipe, capture, train
from small_training import TASK, Recorder, SmallNet, SmallTask, batch_of, equal, loss

RECIPE = Recipe(steps=3, batch=8, lr=0.1, momentum=0.0, nesterov=False, weight_decay=0.0, features=0.7)


class Head(nn.Module):
    """A convolution, dropout and a linear layer."""

    def __init__(self, seed=0, width=4, inplace=False):
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(2, width, 3, bias=False)
        self.dropout = nn.Dropout(0.5, inplace=inplace)
        self.last = nn.Linear(width, 3)

    def features(self, x):
        return F.relu(self.conv(x)).mean((2, 3))

    def forward(self, x):
        return self.last(self.dropout(self.features(x)))


def features_loss(model, step):
    """Return a loss that needs no gradient of the features, so that only their distance trains the convolution."""
    x, y = batch_of(step)
    outputs = model(x)
    if step.teacher is not None:
        step.teacher(x)
    return F.cross_entropy(outputs.detach() + model.last.bias, y)


FEATURES_ONLY = FunctionTask(loss=features_loss, score=lambda model, split: 0.0, epoch_steps=4)


@pytest.mark.parametrize("inplace", [False, True])
def test_weights_match_a_plain_loop(inplace):
    teacher, ours, plain = Head(1), Head(inplace=inplace), Head()
    rates = []

    def watched(model, step):
        rates.append(step)
        return features_loss(model, step)

    task = FunctionTask(loss=watched, score=lambda model, split: 0.0, epoch_steps=4)
    train(ours, task, RECIPE, teacher=teacher)
    for step, rate in zip(rates, (1.0, 0.75, 0.25), strict=True):  # half a cosine over three steps
        x, _ = batch_of(step)
        with torch.no_grad():
            target = teacher.features(x)
        distance = 0.7 * (plain.features(x) - target).square().sum() / target.square().sum()
        (gradient,) = torch.autograd.grad(distance, [plain.conv.weight])
        with torch.no_grad():
            plain.conv.weight -= 0.1 * rate * gradient
    assert torch.allclose(ours.conv.weight, plain.conv.weight, atol=1e-6)
    assert not torch.allclose(ours.conv.weight, Head().conv.weight, atol=1e-4)


def test_a_model_with_the_features_of_its_teacher_keeps_them_in_spite_of_dropout():
    model = Head()
    train(model, FEATURES_ONLY, RECIPE, teacher=Head())
    assert torch.equal(model.conv.weight, Head().conv.weight)


def test_nothing_is_added_without_a_teacher_or_a_weight():
    plain, weighted = SmallNet(), SmallNet()
    train(plain, TASK, RECIPE.replace(features=0))
    train(weighted, TASK, RECIPE)
    assert equal(plain, weighted)
    train(plain, TASK, RECIPE.replace(features=0), teacher=SmallNet(seed=9))
    train(weighted, TASK, RECIPE, teacher=SmallNet(seed=9))
    assert not equal(plain, weighted)


def test_captured_steps_match_features(monkeypatch):
    eager, captured = SmallNet(), SmallNet()
    recipe = RECIPE.replace(steps=8, ema=0.5)
    train(eager, SmallTask(), recipe, teacher=SmallNet(seed=9), device="cpu")
    recorder = Recorder()
    monkeypatch.setitem(capture.RECORDERS, "cpu", recorder)
    train(captured, SmallTask(), recipe, teacher=SmallNet(seed=9), device="cpu")
    assert recorder.replays == 8
    assert equal(eager, captured)


def test_hooks_are_removed():
    model, teacher = SmallNet(), SmallNet(seed=9)
    train(model, TASK, RECIPE, teacher=teacher)
    for part in (*model.modules(), *teacher.modules()):
        assert not part._forward_hooks
        assert not part._forward_pre_hooks
    copy.deepcopy(model)


def without_teacher(model, step):
    x, y = batch_of(step)
    return F.cross_entropy(model(x), y)


REFUSED = [
    (
        SmallNet(), nn.Sequential(nn.Conv2d(2, 3, 5), nn.Flatten()), TASK,
        "The recipe matches the input of the last linear layer, but the teacher has no linear layer. Set the recipe's "
        "features to 0.",
    ),
    (
        Head(), Head(width=5), TASK,
        "The model's features have the shape (8, 4) and those of its teacher (8, 5), so they cannot be matched. Set "
        "the recipe's features to 0.",
    ),
    (
        SmallNet(), SmallNet(seed=9), FunctionTask(loss=without_teacher, score=TASK.score, epoch_steps=4),
        "The recipe matches features, but the task's loss did not run the teacher. Set the recipe's features to 0, or "
        "call step.teacher in the loss.",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("model", "teacher", "task", "message"), REFUSED, ids=["no linear layer", "width", "not run"])
def test_what_cannot_be_matched_is_refused(model, teacher, task, message):
    with pytest.raises(InvalidValue) as caught:
        train(model, task, RECIPE, teacher=teacher)
    assert str(caught.value) == message


def test_a_loss_without_gradient_is_still_refused():
    def detached(model, step):
        return loss(model, step).detach()

    task = FunctionTask(loss=detached, score=TASK.score, epoch_steps=4)
    with pytest.raises(InvalidValue, match="has no gradient"):
        train(SmallNet(), task, RECIPE, teacher=SmallNet(seed=9))
