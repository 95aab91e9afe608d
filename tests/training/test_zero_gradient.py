"""A loss that trains nothing is refused or reported in the first step, whether or not the steps are captured."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F

from depthfold.errors import InvalidValue
from depthfold.training import Recipe, stepper, train
from depthfold.training.capture import RECORDERS
from depthfold.training.stepper import ZeroGradient
from small_training import Recorder, SmallNet, SmallTask

RECIPE = Recipe(steps=6, batch=8, lr=0.1, weight_decay=0.0, evaluate=2)


class Task(SmallTask):
    """A task whose loss is a function of the model, the images and the teacher."""

    def __init__(self, loss):
        super().__init__()
        self.of = loss

    def batch_loss(self, model, batch, step):
        return self.of(model, batch[0], step.teacher)


def constant(model, x, teacher):
    return model(x).sum() * 0 + 2.5


@pytest.fixture(params=["eager", "captured"])
def capture(request, monkeypatch):
    """Return whether steps are captured: on a CPU, by a stand-in that runs the recorded function again."""
    if request.param == "captured":
        monkeypatch.setitem(RECORDERS, "cpu", Recorder())
    return request.param == "captured"


def given(loss, device, capture, **options):
    """Return the warnings of a training, and the model."""
    model = options.pop("model", None) or SmallNet()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = train(model, Task(loss), RECIPE, device=device, capture=capture, **options)
    assert result.execution.startswith("CUDA graph") == capture
    return [each for each in caught if each.category is ZeroGradient], model


def test_loss_that_ignores_the_outputs_is_reported_once(device, capture):
    found, model = given(constant, device, capture)
    assert [str(each.message) for each in found] == [
        "The loss of the first step is 2.5, and its gradient is zero for every parameter of the model, so nothing is "
        "trained. Check whether the task's loss depends on the outputs of the model."
    ]
    fresh = SmallNet().to(device)
    assert all(map(torch.equal, model.parameters(), fresh.parameters()))


def test_loss_of_another_model_is_refused(device, capture):
    other = SmallNet().to(device)
    task = Task(lambda model, x, teacher: other(x).square().mean())
    with pytest.raises(InvalidValue, match=r"no gradient for any parameter .* uses the model that its loss is given"):
        train(SmallNet(), task, RECIPE, device=device, capture=capture)


def test_student_that_equals_its_teacher_is_not_reported(device, capture):
    """The loss cannot be less. It is not constant."""

    def distance(model, x, teacher):
        return F.mse_loss(model.mix.weight, teacher(x))

    class Weights(SmallNet):
        def forward(self, x):
            return self.mix.weight

    found, _ = given(distance, device, capture, teacher=Weights())
    assert found == []


def test_one_gradient_is_enough(device, capture):
    """Most parameters have no gradient here, or one of zero."""
    found, model = given(lambda model, x, _: constant(model, x, _) + model.tied.bias[0], device, capture)
    assert found == []
    assert not torch.equal(model.tied.bias.cpu(), SmallNet().tied.bias)


def test_only_the_first_step_looks_at_the_gradients(device, capture, monkeypatch):
    looked, real = [], stepper._has_gradient

    def counted(parameters):
        looked.append(1)
        return real(parameters)

    monkeypatch.setattr(stepper, "_has_gradient", counted)
    given(constant, device, capture)
    assert looked == [1]
