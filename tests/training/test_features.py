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
    """A convolution, dropout and a linear layer. With `flatten`, the map is flattened after dropout."""

    def __init__(self, seed=0, width=4, inplace=False, flatten=False):
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(2, width, 3, bias=False)
        self.dropout = nn.Dropout(0.5, inplace=inplace)
        self.last = nn.Linear(width, 3)
        self.flatten = flatten

    def features(self, x):
        return F.relu(self.conv(x)).mean((2, 3))

    def forward(self, x):
        if self.flatten:
            return self.last(self.dropout(self.features(x)[:, :, None, None]).flatten(1))
        return self.last(input=self.dropout(self.features(x)))


def features_loss(model, step):
    """Return a loss that needs no gradient of the features, so that only their distance trains the convolution."""
    x, y = batch_of(step)
    outputs = model(x)
    if step.teacher is not None:
        step.teacher(x)
    return F.cross_entropy(outputs.detach() + model.last.bias, y)


FEATURES_ONLY = FunctionTask(loss=features_loss, score=lambda model, split: 0.0, epoch_steps=4)


@pytest.mark.parametrize("options", [dict(), dict(inplace=True), dict(flatten=True)], ids=str)
def test_weights_match_a_plain_loop(options):
    teacher, ours, plain = Head(1), Head(**options), Head()
    steps = []

    def watched(model, step):
        steps.append(step)
        return features_loss(model, step)

    task = FunctionTask(loss=watched, score=lambda model, split: 0.0, epoch_steps=4)
    train(ours, task, RECIPE, teacher=teacher)
    for step, rate in zip(steps, (1.0, 0.75, 0.25), strict=True):  # half a cosine over three steps
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


class Gated(nn.Module):
    """A network whose last linear layer is defined before those of a gate."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.last = nn.Linear(4, 3)
        self.conv = nn.Conv2d(2, 4, 3, bias=False)
        self.gate = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Sigmoid())

    def forward(self, x):
        x = F.relu(self.conv(x))
        return self.last((x * self.gate(x.mean((2, 3)))[:, :, None, None]).mean((2, 3)))


def test_the_layer_that_runs_last_counts_in_a_graph_and_in_the_model_that_was_traced():
    model = Gated()
    graph = torch.fx.symbolic_trace(model)
    assert [name for name, part in graph.named_modules() if isinstance(part, nn.Linear)][-1] == "last"
    student = copy.deepcopy(graph)
    train(student, FEATURES_ONLY, RECIPE, teacher=model)
    assert torch.equal(student.conv.weight, model.conv.weight)


def test_features_that_are_all_zero_can_be_matched():
    model, teacher = Head(), Head()
    nn.init.zeros_(teacher.conv.weight)
    train(model, FEATURES_ONLY, RECIPE.replace(steps=1, features=1e-12), teacher=teacher)
    assert torch.isfinite(model.conv.weight).all()
    assert not torch.equal(model.conv.weight, Head().conv.weight)


def test_a_score_may_copy_the_model():
    model = nn.Sequential(Head(), nn.Dropout(0.5))
    task = FunctionTask(loss=loss, score=lambda model, split: float(len(list(copy.deepcopy(model).modules()))))
    assert train(model, task, RECIPE, teacher=nn.Sequential(Head(1), nn.Dropout(0.5))).score == 6


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


def without_teacher(model, step):
    x, y = batch_of(step)
    return F.cross_entropy(model(x), y)


REFUSED = [
    (
        SmallNet(), nn.Sequential(nn.Conv2d(2, 3, 5), nn.Flatten()), TASK,
        "The recipe matches the input of the last linear layer (features=0.7), but Sequential has no linear layer. Set "
        "the recipe's features to 0.",
    ),
    (
        Head(), Head(width=5), TASK,
        "The model's features have the shape (8, 4) (input of last) and those of its teacher (8, 5) (input of last), "
        "so they cannot be matched. Set the recipe's features to 0.",
    ),
    (
        SmallNet(), SmallNet(seed=9), FunctionTask(loss=without_teacher, score=TASK.score, epoch_steps=4),
        "The recipe matches the input of the last linear layer, but in the task's loss no linear layer of the teacher "
        "ran. The loss must call step.teacher. To match nothing, set the recipe's features to 0.",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("model", "teacher", "task", "message"), REFUSED, ids=["no linear layer", "width", "not run"])
def test_what_cannot_be_matched_is_refused(model, teacher, task, message):
    with pytest.raises(InvalidValue) as caught:
        train(model, task, RECIPE, teacher=teacher)
    assert str(caught.value) == message
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in (*model.modules(), *teacher.modules()))


def test_a_loss_without_gradient_is_still_refused():
    def detached(model, step):
        return loss(model, step).detach()

    task = FunctionTask(loss=detached, score=TASK.score, epoch_steps=4)
    with pytest.raises(InvalidValue, match="has no gradient"):
        train(SmallNet(), task, RECIPE, teacher=SmallNet(seed=9))
