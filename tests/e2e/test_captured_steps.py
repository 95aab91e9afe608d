"""Training steps on each device of this machine, captured where the device allows it, against eager ones."""

from __future__ import annotations

import gc
import json

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from depthfold.backends.cuda import cuda_settings
from depthfold.tasks import ClassificationTask
from depthfold.training import FunctionTask, Recipe, Step, recalibrate, scoring, train
from layouts import labels, pictures
from small_training import TASK, SmallNet, SmallTask, batch_of, equal, score

RECIPE = Recipe(steps=20, batch=16, lr=0.1, weight_decay=1e-3, warmup=3, clip=0.5, ema=0.8, evaluate=8)
HALF = RECIPE.replace(precision="bfloat16", channels_last=True)


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    """Without this, cuDNN may add gradients in any order, so that two equal trainings differ."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    with cuda_settings(tf32=False, benchmark=False):
        yield


def execution(device):
    return {"cpu": "eager: the device is cpu", "cuda": "CUDA graph"}[device]


def both(device, task, recipe=RECIPE, net=SmallNet, **options):
    """Train with and without capture. Return both models and both results."""
    one, two = net(), net()
    found = train(one, task, recipe, device=device, **options)
    expected = train(two, task, recipe, device=device, capture=False, **options)
    assert expected.execution == "eager: capture=False"
    return one, two, found, expected


@pytest.mark.parametrize("changes", [{}, {"ema": None, "clip": None}, {"momentum": 0.0, "nesterov": False}], ids=str)
@pytest.mark.parametrize("teacher", [None, SmallNet(seed=4)], ids=["alone", "taught"])
def test_captured_steps_give_the_same_weights(device, teacher, changes):
    one, two, found, expected = both(device, SmallTask(), RECIPE.replace(**changes), teacher=teacher)
    assert found.execution == execution(device)
    assert equal(one, two)
    assert (found.curve, found.loss) == (expected.curve, expected.loss)


def test_captured_steps_in_bfloat16_give_the_same_weights_up_to_rounding(device):
    one, two, found, expected = both(device, SmallTask(), HALF, teacher=SmallNet(seed=4))
    assert found.execution.startswith(execution(device))
    for name, tensor in two.state_dict().items():
        torch.testing.assert_close(one.state_dict()[name], tensor, rtol=2e-2, atol=2e-2)
    assert found.score == pytest.approx(expected.score, abs=2e-2)


def test_captured_steps_match_the_cpu(device):
    """Without dropout, whose random numbers depend on the device."""
    one, cpu = SmallNet(dropout=0.0), SmallNet(dropout=0.0)
    train(one, SmallTask(), RECIPE, device=device)
    train(cpu, TASK, RECIPE, device="cpu")
    for name, tensor in cpu.state_dict().items():
        torch.testing.assert_close(one.state_dict()[name].cpu(), tensor, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("captured_first", [True, False])
def test_captured_and_eager_runs_resume_each_other(device, captured_first, tmp_path):
    recipe = RECIPE.replace(checkpoint=5)

    class Interrupted(SmallTask):
        def batch(self, step):
            if step.number == 11:
                raise KeyboardInterrupt
            return super().batch(step)

    with pytest.raises(KeyboardInterrupt):
        train(SmallNet(), Interrupted(), recipe, device=device, folder=tmp_path, capture=captured_first)
    resumed, whole = SmallNet(), SmallNet()
    train(resumed, SmallTask(), recipe, device=device, folder=tmp_path, capture=not captured_first)
    train(whole, SmallTask(), recipe, device=device)
    assert equal(resumed, whole)
    lines = [json.loads(line)["execution"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    texts = [execution(device), "eager: capture=False"]
    assert list(dict.fromkeys(lines)) == (texts if captured_first else texts[::-1])


# --- Classification ---


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU6(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8, 3),
    )  # fmt: skip


def classification():
    images, classes = torch.from_numpy(pictures(90, side=16)), torch.from_numpy(labels(90, 3))
    return ClassificationTask.tensors(train=(images, classes))


AUGMENTED = RECIPE.replace(crop="pad", flip=True, erasing=0.5, label_smoothing=0.1)


def test_classification_with_augmentation_is_captured(device):
    one, two, found, expected = both(device, classification(), AUGMENTED, network, teacher=network())
    assert found.execution == execution(device)
    assert equal(one, two) and found.curve == expected.curve


def test_a_batch_does_not_wait_for_the_device(device):
    task, at = classification(), torch.device(device, 0) if device == "cuda" else torch.device(device)
    for recipe in (AUGMENTED, AUGMENTED.replace(crop="resized")):
        task.batch(Step(number=0, seed=0, recipe=recipe, device=at))  # moves the data to the device
        mode = torch.cuda.get_sync_debug_mode() if device == "cuda" else None
        try:
            if mode is not None:
                torch.cuda.set_sync_debug_mode("error")
            images, _ = task.batch(Step(number=1, seed=0, recipe=recipe, device=at))
        finally:
            if mode is not None:
                torch.cuda.set_sync_debug_mode(mode)
        expected, _ = task.batch(Step(number=1, seed=0, recipe=recipe.replace(erasing=0.0)))
        kept = torch.isclose(images.cpu(), expected, atol=0.05)  # erased parts are drawn on the device
        assert kept.float().mean() > 0.5


# --- What cannot be captured ---


class Waits(SmallNet):
    def forward(self, x):
        return super().forward(x) * (1.0 + 0.0 * x.mean().item())


class Synchronises(SmallNet):
    """Fails in the capture itself, not before it."""

    def forward(self, x):
        if x.is_cuda:
            torch.cuda.synchronize()
        return super().forward(x)


class DrawsOnTheCpu(SmallNet):
    def forward(self, x):
        out = super().forward(x)
        return out if self.training and torch.rand(()) < 0.5 else 2 * out


@pytest.mark.parametrize(
    ("net", "reason"),
    [
        (Waits, "eager: the step waits for the device, for example in Tensor.item()"),
        (Synchronises, "eager: the capture failed with "),
        (DrawsOnTheCpu, "eager: the step draws random numbers on the CPU"),
    ],
)
def test_a_failed_capture_leaves_the_device_usable(device, net, reason):
    one, two, found, _ = both(device, SmallTask(), net=net)
    assert found.execution.startswith(reason if device == "cuda" else execution(device))
    assert equal(one, two)  # with dropout, so the generator works
    again, eager, found, _ = both(device, SmallTask())
    assert found.execution == execution(device)
    assert equal(again, eager)


def test_memory_is_freed_after_training(device):
    def allocated():
        train(SmallNet(), SmallTask(), RECIPE, device=device)
        gc.collect()
        return torch.cuda.memory_allocated() if device == "cuda" else 0

    allocated()
    assert allocated() == allocated()


# --- Eager steps ---


def test_parameters_without_a_gradient_in_the_first_steps_are_trained(device):
    """The fused update of SGD needs a momentum for all of them."""

    class Late(SmallNet):
        def __init__(self):
            super().__init__(dropout=0.0)
            self.late = nn.Parameter(torch.ones(3))

    def loss(model, step):
        x, y = batch_of(step)
        outputs = model(x)
        return F.cross_entropy(outputs * model.late if step.number > 2 else outputs, y)

    one, cpu = Late(), Late()
    train(one, FunctionTask(loss=loss, score=score), RECIPE, device=device)
    train(cpu, FunctionTask(loss=loss, score=score), RECIPE, device="cpu")
    assert not torch.equal(one.late.cpu(), torch.ones(3))
    torch.testing.assert_close(one.late.cpu(), cpu.late, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_scores_are_in_the_precision_of_the_training_on_a_gpu(device, precision):
    seen = set()

    class Watched(SmallTask):
        def score(self, model, split):
            seen.add(model(torch.zeros(1, 2, 5, 5, device=device)).dtype)
            return super().score(model, split)

    train(SmallNet(), Watched(), RECIPE.replace(precision=precision), device=device)
    assert seen == {getattr(torch, precision) if device == "cuda" else torch.float32}


def test_scored_outputs_are_those_of_the_model_up_to_rounding(device):
    """In bfloat16 on a GPU, with fused kernels. The running statistics are far from 0 and 1."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU6())
    depthwise = (nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.BatchNorm2d(16), nn.ReLU6(), nn.Conv2d(16, 32, 1))
    plain = nn.Sequential(*layers, *depthwise, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4))
    model = fx.symbolic_trace(plain).to(device)
    task = ClassificationTask.tensors(train=(pictures(64), labels(64, 4)), holdout=0.5)
    recalibrate(model, task, HALF, steps=range(2), seed=0)
    model.eval()
    with torch.no_grad(), scoring(model, HALF, torch.device(device)):
        assert ("forward" in vars(model)) == (device == "cuda")
        found = task.outputs(model, "holdout")
    assert "forward" not in vars(model)
    expected = task.outputs(model, "holdout")
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
