"""Steps that are not captured: the reasons, and what a failed capture leaves behind (nothing)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from depthfold.errors import InvalidValue
from depthfold.training import BatchTask, DeviceContext, FunctionTask, Recipe, train
from depthfold.training.capture import CAPTURED, RECORDERS, why_eager
from small_training import TASK, Recorder, SmallNet, SmallTask, batch_of, equal, loss, score

RECIPE = Recipe(steps=10, batch=8, lr=0.1, weight_decay=1e-3, warmup=3, clip=0.5, ema=0.8, evaluate=4)


@pytest.fixture
def recorder(monkeypatch):
    found = Recorder()
    monkeypatch.setitem(RECORDERS, "cpu", found)
    return found


def eager(task, net=SmallNet, **options):
    model = net()
    return model, train(model, task, RECIPE, capture=False, **options)


class OwnLoss(SmallTask):
    def loss(self, model, step):
        return 2 * super().loss(model, step)


class OwnBatchLoss(SmallTask):
    def batch_loss(self, model, batch, step):
        return 2 * super().batch_loss(model, batch, step)


class BothLosses(OwnLoss):
    def batch_loss(self, model, batch, step):
        return 3 * super().batch_loss(model, batch, step)


class OwnBatch(SmallTask):
    def batch(self, step):
        x, y = super().batch(step)
        return x + 1, y


class Delegating:
    """A task that passes everything on to another, except for the loss."""

    def __init__(self):
        self.task = SmallTask()

    def __getattr__(self, name):
        return getattr(self.task, name)

    def loss(self, model, step):
        return 2 * self.task.loss(model, step)


def test_a_run_on_the_cpu_is_eager():
    assert train(SmallNet(), SmallTask(), RECIPE).execution == "eager: the device is cpu"
    assert train(SmallNet(), TASK, RECIPE).execution == "eager: the device is cpu"


@pytest.mark.parametrize(
    ("task", "changes", "context", "reason"),
    [
        (SmallTask(), {}, {}, None),
        (SmallTask(), {"precision": "bfloat16"}, {}, None),
        (OwnBatch(), {}, {}, None),
        (OwnBatchLoss(), {}, {}, None),
        (SmallTask(), {}, {"world_size": 2}, "2 processes train together"),
        (SmallTask(), {"precision": "float16"}, {}, "in float16, a step may be skipped"),
        (TASK, {}, {}, "the task has no batch() and batch_loss()"),
        (OwnLoss(), {}, {}, "the class that defines the task's loss() has no batch_loss()"),
        (BothLosses(), {}, {}, "the class that defines the task's loss() has no batch_loss()"),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "loss") else str(value),
)
def test_reasons(recorder, task, changes, context, reason):
    where = DeviceContext(device=torch.device("cpu"), **context)
    assert why_eager(task, RECIPE.replace(**changes), where) == reason


def test_a_task_that_delegates_its_batch_is_eager(recorder):
    model = SmallNet()
    assert train(model, Delegating(), RECIPE).execution.startswith("eager: ")
    assert equal(model, eager(OwnLoss())[0])


@pytest.mark.parametrize(("steps", "captured"), [(3, False), (4, True)])
def test_few_steps_are_eager(recorder, steps, captured):
    recipe = Recipe(steps=steps, batch=8)
    model, expected = SmallNet(), SmallNet()
    found = train(model, SmallTask(), recipe)
    train(expected, SmallTask(), recipe, capture=False)
    assert found.execution == (CAPTURED if captured else "eager: fewer than 4 steps are left")
    assert recorder.recordings == captured
    assert equal(model, expected)


def test_few_remaining_steps_are_eager(recorder, tmp_path):
    recipe = RECIPE.replace(checkpoint=7)

    def interrupt(model, batch, step):
        if len(calls) == 9:
            raise KeyboardInterrupt
        calls.append(1)

    calls = []
    with pytest.raises(KeyboardInterrupt):
        train(SmallNet(), SmallTask(interrupt), recipe, folder=tmp_path)
    found = train(SmallNet(), SmallTask(), recipe, folder=tmp_path)
    assert found.execution == "eager: fewer than 4 steps are left"


@pytest.mark.parametrize("teacher", [None, SmallNet(seed=4)], ids=["alone", "taught"])
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("operation not permitted\nwhen capturing"), "RuntimeError: operation not permitted"),
        (torch.OutOfMemoryError("CUDA out of memory."), "OutOfMemoryError: CUDA out of memory."),
        (NotImplementedError(), "NotImplementedError: "),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_failed_capture_changes_nothing(recorder, error, reason, teacher):
    recorder.error = error
    model = SmallNet()
    found = train(model, SmallTask(), RECIPE, teacher=teacher)
    expected, result = eager(SmallTask(), teacher=teacher)
    assert found.execution == f"eager: the capture failed with {reason}"
    assert recorder.recordings == 1
    assert equal(model, expected)
    assert (found.curve, found.loss) == (result.curve, result.loss)


def test_a_failed_capture_of_a_resumed_run_changes_nothing(recorder, tmp_path):
    recipe = RECIPE.replace(checkpoint=3)

    class Interrupted(SmallTask):
        def batch(self, step):
            if step.number == 5:
                raise KeyboardInterrupt
            return super().batch(step)

    with pytest.raises(KeyboardInterrupt):
        train(SmallNet(), Interrupted(), recipe, folder=tmp_path)
    recorder.error = RuntimeError("no")
    model = SmallNet()
    train(model, SmallTask(), recipe, folder=tmp_path)
    assert equal(model, eager(SmallTask())[0])


def test_an_error_of_the_task_is_raised(recorder):
    class Wrong(SmallTask):
        def batch_loss(self, model, batch, step):
            return super().batch_loss(model, batch, step).item()

    with pytest.raises(InvalidValue, match=r"^The task's loss must be a tensor with a single number, found float.$"):
        train(SmallNet(), Wrong(), RECIPE)


class ByNumber(SmallTask):
    def batch_loss(self, model, batch, step):
        return super().batch_loss(model, batch, step) * (1 + step.number)


class WithGenerator(SmallTask):
    def batch_loss(self, model, batch, step):
        x, y = batch
        return super().batch_loss(model, (x + torch.rand(1, generator=step.generator()), y), step)


@pytest.mark.parametrize("task", [ByNumber, WithGenerator])
def test_a_loss_that_depends_on_the_number_of_the_step_is_eager(recorder, task):
    model = SmallNet()
    found = train(model, task(), RECIPE)
    assert found.execution == "eager: batch_loss() depends on the number of the step"
    assert equal(model, eager(task())[0])


class Replacing(SmallNet):
    """A network that assigns a new tensor to its buffer instead of changing it in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean().detach()
        return super().forward(x) + self.mean


def test_a_forward_that_replaces_buffers_is_eager(recorder):
    model = Replacing()
    found = train(model, SmallTask(), RECIPE)
    assert found.execution == "eager: the forward replaces tensors of the model"
    assert recorder.resets == 1
    assert equal(model, eager(SmallTask(), Replacing)[0])


def test_a_batch_that_is_not_a_tuple_of_tensors_is_eager(recorder):
    class Named(SmallTask):
        def batch(self, step):
            return dict(zip("xy", batch_of(step), strict=True))

        def batch_loss(self, model, batch, step):
            return super().batch_loss(model, (batch["x"], batch["y"]), step)

    model = SmallNet()
    assert train(model, Named(), RECIPE).execution == "eager: batch() does not return a tuple of tensors"
    assert equal(model, eager(Named())[0])


def test_batch_tasks_are_recognised():
    assert isinstance(SmallTask(), BatchTask)
    assert not isinstance(FunctionTask(loss=loss, score=score), BatchTask)


def test_momentum_that_a_taken_back_step_allocated_is_equal_to_none(recorder):
    """Otherwise the first captured step would differ from an eager one."""
    model, plain = nn.Linear(3, 1, bias=False), nn.Linear(3, 1, bias=False)
    plain.load_state_dict(copy.deepcopy(model.state_dict()))

    class Linear(SmallTask):
        def batch(self, step):
            return (torch.full((1, 3), 1.0 + step.number),)

        def batch_loss(self, model, batch, step):
            return model(batch[0]).sum()

    train(model, Linear(), Recipe(steps=4, lr=0.1), split=None)
    optimizer = torch.optim.SGD(plain.parameters(), momentum=0.9, nesterov=True, weight_decay=1e-5)
    for number in range(4):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 + torch.cos(torch.tensor(number / 4 * torch.pi)).item())
        optimizer.zero_grad()
        plain(torch.full((1, 3), 1.0 + number)).sum().backward()
        optimizer.step()
    assert recorder.replays == 4
    assert torch.allclose(model.weight, plain.weight, rtol=1e-5)
