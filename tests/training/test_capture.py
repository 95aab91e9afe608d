"""Captured steps against eager ones, with a recorder that runs the recorded function again instead of a CUDA graph."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from torch import fx, nn

from depthfold.training import DeviceContext, FunctionTask, Recipe, Step, forwards, train
from depthfold.training import stepper as stepper_module
from depthfold.training.capture import CAPTURED, RECORDERS, StepRunner
from depthfold.training.stepper import Stepper
from small_training import Recorder, SmallNet, SmallTask, equal, loss, score

RECIPE = Recipe(steps=10, batch=8, lr=0.1, weight_decay=1e-3, warmup=3, clip=0.5, ema=0.8, evaluate=4)
TEACHERS = pytest.mark.parametrize("teacher", [None, SmallNet(seed=4)], ids=["alone", "taught"])


@pytest.fixture
def recorder(monkeypatch):
    found = Recorder()
    monkeypatch.setitem(RECORDERS, "cpu", found)
    return found


def eager(task, recipe=RECIPE, **options):
    model = SmallNet()
    found = train(model, task, recipe, capture=False, **options)
    assert found.execution == "eager: capture=False"
    return model, found


@TEACHERS
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"ema": None, "clip": None},
        {"momentum": 0.0, "nesterov": False},
        {"precision": "bfloat16", "channels_last": True},
        {"keep": "best"},
    ],
    ids=str,
)
def test_captured_steps_give_the_same_weights(recorder, changes, teacher):
    recipe, model = RECIPE.replace(**changes), SmallNet()
    found = train(model, SmallTask(), recipe, teacher=teacher, seed=5)
    expected, result = eager(SmallTask(), recipe, teacher=teacher, seed=5)
    assert found.execution == CAPTURED
    assert equal(model, expected)
    assert (found.curve, found.loss, found.best) == (result.curve, result.loss, result.best)
    assert (recorder.recordings, recorder.replays, recorder.resets) == (1, 10, 1)


def test_every_replay_reads_the_same_tensors(recorder):
    """A CUDA graph reads from fixed addresses, so its inputs must be copied there."""
    seen = []

    def watch(model, batch, step):
        seen.append((*(tensor.data_ptr() for tensor in batch), stepper.optimizer.param_groups[0]["lr"].data_ptr()))

    recipe, device = Recipe(steps=5, batch=8), torch.device("cpu")
    stepper = Stepper(SmallNet(), recipe, DeviceContext(device=device))
    runner = StepRunner(stepper, SmallTask(watch), None, total=5)
    for number in range(5):
        runner.take(Step(number=number, seed=0, recipe=recipe, device=device), 0.1 + number)
        assert stepper.optimizer.param_groups[0]["lr"].item() == pytest.approx(0.1 + number)
    assert len(seen) == 6 and len(set(seen)) == 1  # the warm-up and five replays


def test_losses_are_copied_before_the_next_replay(recorder):
    recipe, device = Recipe(steps=5, batch=8), torch.device("cpu")
    runner = StepRunner(Stepper(SmallNet(), recipe, DeviceContext(device=device)), SmallTask(), None, total=5)
    losses = [runner.take(Step(number=number, seed=0, recipe=recipe, device=device), 0.1) for number in range(5)]
    assert len({loss.item() for loss in losses}) == 5


@pytest.mark.parametrize("captured_first", [True, False])
def test_captured_and_eager_runs_resume_each_other(recorder, captured_first, tmp_path):
    recipe = RECIPE.replace(checkpoint=3)

    class Interrupted(SmallTask):
        def batch(self, step):
            if step.number == 5:
                raise KeyboardInterrupt
            return super().batch(step)

    with pytest.raises(KeyboardInterrupt):
        train(SmallNet(), Interrupted(), recipe, folder=tmp_path, capture=captured_first)
    model = SmallNet()
    found = train(model, SmallTask(), recipe, folder=tmp_path, capture=not captured_first)
    expected, result = eager(SmallTask(), recipe)
    assert equal(model, expected)
    assert found.curve == result.curve
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    texts = [CAPTURED, "eager: capture=False"]
    assert list(dict.fromkeys(line["execution"] for line in lines)) == (texts if captured_first else texts[::-1])


def test_batches_of_another_shape_are_taken_eagerly(recorder):
    class Uneven(SmallTask):
        def batch(self, step):
            x, y = super().batch(step)
            return (x[:5], y[:5]) if step.number in (2, 7) else (x, y)

    model = SmallNet()
    found = train(model, Uneven(), RECIPE)
    assert found.execution == CAPTURED
    assert equal(model, eager(Uneven())[0])
    assert (recorder.recordings, recorder.replays) == (1, 8)


def test_a_score_that_moves_the_weights_leads_to_a_new_capture(recorder):
    class Moving(SmallTask):
        def score(self, model, split):
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.data = tensor.data.clone()  # like model.cpu().cuda()
            return score(model, split)

    model = SmallNet()
    assert train(model, Moving(), RECIPE).execution == CAPTURED
    assert equal(model, eager(Moving())[0])
    assert (recorder.recordings, recorder.replays, recorder.resets) == (2, 8, 2)  # two steps are left after the second


def test_global_random_state_is_restored(recorder):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    train(SmallNet(), SmallTask(), RECIPE)
    assert torch.equal(torch.rand(4), expected)


def test_batch_may_draw_from_the_global_generator(recorder):
    """Dropout comes after it in the same sequence, also in the step that is captured."""

    class Noisy(SmallTask):
        def batch(self, step):
            x, y = super().batch(step)
            return x + torch.randn(x.shape), y

    model = SmallNet()
    train(model, Noisy(), RECIPE)
    assert equal(model, eager(Noisy())[0])


def test_batch_is_made_under_autocast_as_in_an_eager_step(recorder):
    class Mixing(SmallTask):
        def batch(self, step):
            x, y = super().batch(step)
            return x @ torch.linspace(0, 1, 25).reshape(5, 5), y

    model, recipe = SmallNet(), RECIPE.replace(precision="bfloat16")
    train(model, Mixing(), recipe)
    assert equal(model, eager(Mixing(), recipe)[0])


# --- The fused update of SGD, which CUDA devices use ---


@pytest.fixture
def fused_update(monkeypatch):
    monkeypatch.setattr(stepper_module, "fuses_update", lambda recipe, context: True)


@TEACHERS
@pytest.mark.parametrize("changes", [{}, {"momentum": 0.0, "nesterov": False}], ids=str)
def test_captured_fused_updates_give_the_same_weights(recorder, fused_update, monkeypatch, changes, teacher):
    model, recipe = SmallNet(), RECIPE.replace(**changes)
    train(model, SmallTask(), recipe, teacher=teacher)
    assert equal(model, eager(SmallTask(), recipe, teacher=teacher)[0])
    monkeypatch.undo()
    plain, _ = eager(SmallTask(), recipe, teacher=teacher)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor)


def test_a_fused_update_trains_parameters_without_a_gradient_in_the_first_steps(fused_update, monkeypatch):
    def late(model, step):
        value = loss(model, step)
        return value if step.number < 3 else value + model.late.square().sum()

    def trained():
        model = SmallNet()
        model.late = nn.Parameter(torch.ones(3))
        train(model, FunctionTask(loss=late, score=score), RECIPE)
        return model

    found = trained()
    monkeypatch.undo()
    assert not torch.equal(found.late, torch.ones(3))
    torch.testing.assert_close(found.state_dict(), trained().state_dict())


# --- Fused kernels ---


class Fused(nn.Module):
    """A module with the tensors of another one."""

    def __init__(self, model, seen):
        super().__init__()
        self.model, self.seen, self.closed = model, seen, False

    def forward(self, x):
        self.seen.append(self.model)
        return type(self.model).forward(self.model, x)

    def close(self):
        self.closed = True


@pytest.fixture
def fused(monkeypatch):
    """Replace fuse() and fuse_eval(), and return the models that were computed with fused kernels."""
    seen = []
    for name in ("fuse", "fuse_eval"):
        monkeypatch.setattr(forwards, name, lambda model, prepare: Fused(model, seen))
    return seen


HALF = RECIPE.replace(precision="bfloat16", channels_last=True)


def graph(seed=0):
    return fx.symbolic_trace(SmallNet(seed=seed))


def test_fused_kernels_compute_student_and_teacher(recorder, fused):
    model, teacher = graph(), graph(seed=4)
    found = train(model, SmallTask(), HALF, teacher=teacher)
    assert found.execution == f"{CAPTURED}, fused kernels"
    assert [id(each) for each in fused] == [id(model), id(teacher)] * 11
    assert equal(model, eager(SmallTask(), HALF, teacher=SmallNet(seed=4))[0])


@pytest.mark.parametrize("changes", [{"precision": "float32"}, {"channels_last": False}], ids=str)
def test_fused_kernels_need_bfloat16_and_channels_last(recorder, fused, changes):
    assert train(graph(), SmallTask(), HALF.replace(**changes)).execution == CAPTURED
    assert fused == []


def test_without_fused_kernels_for_a_model_its_steps_are_captured(recorder, fused, monkeypatch):
    for name in ("fuse", "fuse_eval"):
        monkeypatch.setattr(forwards, name, lambda model, prepare: None)
    assert train(graph(), SmallTask(), HALF, teacher=graph(seed=4)).execution == CAPTURED


def test_if_fused_kernels_fail_the_plain_step_is_captured(recorder, fused, monkeypatch):
    def fails(self, x):
        self.model.norm(torch.randn(2, 4, 3, 3))  # changes the statistics
        raise ValueError("no compiler\nfound")

    monkeypatch.setattr(Fused, "forward", fails)
    model = graph()
    found = train(model, SmallTask(), HALF)
    assert found.execution == f"{CAPTURED}, without fused kernels: the capture failed with ValueError: no compiler"
    assert equal(model, eager(SmallTask(), HALF)[0])


def test_if_fused_kernels_cannot_be_built_the_plain_step_is_captured(recorder, monkeypatch):
    def fails(model, prepare):
        raise ImportError("no driver")

    monkeypatch.setattr(forwards, "fuse", fails)
    found = train(graph(), SmallTask(), HALF)
    assert found.execution == f"{CAPTURED}, without fused kernels: the capture failed with ImportError: no driver"


def test_only_graphs_have_fused_kernels(recorder, fused):
    """The trace of another model may freeze what its Python code computes."""
    model = graph()
    model.forward = lambda x: 2 * type(model).forward(model, x)  # replaced by the user
    for each in (SmallNet(), model):
        assert train(each, SmallTask(), HALF).execution == CAPTURED
    assert fused == []


def test_a_loss_may_use_the_modules_of_the_model(recorder, fused):
    class Penalised(SmallTask):
        def batch_loss(self, model, batch, step):
            scales = [module.weight.abs().sum() for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
            return super().batch_loss(model, batch, step) + 0.1 * sum(scales)

    model = graph()
    assert train(model, Penalised(), HALF).execution == f"{CAPTURED}, fused kernels"
    assert fused
    assert equal(model, eager(Penalised(), HALF)[0])
    assert not equal(model, eager(SmallTask(), HALF)[0])
    assert "forward" not in vars(model)


def test_a_score_falls_back_if_a_kernel_fails(fused, monkeypatch):
    model, x = graph().eval(), torch.randn(3, 2, 5, 5)
    wanted = model(x)

    def fails(self, x):
        raise ValueError("no compiler")

    monkeypatch.setattr(Fused, "forward", fails)
    with forwards.FusedForwards((model,), HALF, fallback=True):
        with pytest.warns(RuntimeWarning, match="scored without them: ValueError: no compiler"):
            first = model(x)
        with warnings.catch_warnings(action="error"):
            second = model(x)
    assert torch.equal(first, wanted)
    assert torch.equal(second, wanted)
    assert "forward" not in vars(model)
