"""The recipe alone sets the precision, and accelerate's state is not changed."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from torch import nn

from depthfold.errors import InvalidValue, MissingDependency, NotFinite
from depthfold.training import FunctionTask, Recipe, Step, device, train
from depthfold.training.stepper import learning_rate
from small_training import TASK, SmallNet, batch_of, equal, loss, score

RECIPE = Recipe(steps=6, batch=8, lr=0.05)


@pytest.fixture(autouse=True)
def reset_accelerate():
    """Reset the state of accelerate before and after the test."""
    AcceleratorState._reset_state(reset_partial_state=True)
    device._read_new_state.cache_clear()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    device._read_new_state.cache_clear()


def dtypes(recipe, teacher=None):
    """Return the dtypes in which student and teacher compute and in which the model is scored."""
    seen = set()

    def watching(model, step):
        x, _ = batch_of(step)
        seen.add(("student", model(x).dtype))
        if step.teacher is not None:
            seen.add(("teacher", step.teacher(x).dtype))
        return loss(model, step)

    def scoring(model, split):
        seen.add(("score", model(torch.zeros(1, 2, 5, 5)).dtype))
        return 0.0

    model = SmallNet()
    train(model, FunctionTask(loss=watching, score=scoring), recipe, teacher=teacher)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    return seen


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_recipe_sets_the_precision(precision):
    dtype = getattr(torch, precision)
    expected = {("student", dtype), ("teacher", dtype), ("score", torch.float32)}
    assert dtypes(RECIPE.replace(precision=precision), teacher=SmallNet(seed=4)) == expected


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(torch.float16, "float16"), (torch.float16, "bfloat16"), (torch.bfloat16, "float16")],
    ids=str,
)
def test_half_weights_need_their_own_precision(dtype, precision):
    said = rf"are {str(dtype)[6:]}.* \(conv\.weight\).*precision {precision}.*float32.*model\.float\(\)"
    with pytest.raises(InvalidValue, match=said):
        train(SmallNet().to(dtype), TASK, RECIPE.replace(precision=precision))


def test_precision_can_change_within_a_process():
    order = ("bfloat16", "float32", "float16", "bfloat16")
    nets = [SmallNet() for _ in order]
    for net, precision in zip(nets, order, strict=True):
        train(net, TASK, RECIPE.replace(precision=precision))
    assert equal(nets[0], nets[3])
    assert not equal(nets[0], nets[1])
    assert not equal(nets[1], nets[2])
    assert torch.allclose(nets[0].conv.weight, nets[1].conv.weight, atol=0.05)


def test_existing_accelerator_is_not_changed():
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    assert dtypes(RECIPE) == {("student", torch.float32), ("score", torch.float32)}
    assert accelerator.mixed_precision == "bf16"
    assert Accelerator().mixed_precision == "bf16"


def test_training_leaves_no_accelerate_state():
    train(SmallNet(), TASK, RECIPE.replace(precision="bfloat16"))
    assert PartialState._shared_state == {}
    assert Accelerator(mixed_precision="no", cpu=True).mixed_precision == "no"
    train(SmallNet(), TASK, RECIPE)


def test_surrounding_inference_mode_changes_nothing():
    train(alone := SmallNet(), TASK, RECIPE)
    inside = SmallNet()
    with torch.inference_mode():
        train(inside, TASK, RECIPE)
    assert equal(alone, inside)


@pytest.mark.parametrize("teacher", [None, SmallNet(seed=4)])
@pytest.mark.parametrize("ema", [None, 0.5])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_surrounding_autocast_changes_nothing(precision, ema, teacher):
    recipe = RECIPE.replace(precision=precision, ema=ema, evaluate=2)
    alone = SmallNet()
    expected = train(alone, TASK, recipe, teacher=teacher)
    for kind in (torch.bfloat16, torch.float16):
        inside = SmallNet()
        with torch.autocast("cpu", dtype=kind):
            found = train(inside, TASK, recipe, teacher=teacher)
            assert torch.is_autocast_enabled("cpu")
            assert torch.get_autocast_dtype("cpu") == kind
        assert equal(alone, inside)
        assert found.curve == expected.curve


def test_each_step_uses_the_updated_weights():
    """PyTorch keeps cast weights until the outermost autocast ends."""
    ours, plain = SmallNet(dropout=0.0), SmallNet(dropout=0.0)
    recipe = RECIPE.replace(precision="bfloat16", momentum=0, nesterov=False, weight_decay=0)
    train(ours, TASK, recipe)
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad])
    for number in range(6):
        optimizer.param_groups[0]["lr"] = learning_rate(recipe, number, 6)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = loss(plain, Step(number=number, seed=0, recipe=recipe))
        value.backward()
        optimizer.step()
    assert equal(ours, plain)


def test_score_inside_autocast_uses_the_current_weights():
    def scoring(model, split):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return score(model, split)

    model = SmallNet()
    trained = train(model, FunctionTask(loss=loss, score=scoring), RECIPE.replace(precision="bfloat16", evaluate=2))
    assert trained.score == scoring(model.eval(), "holdout")


def test_loaded_weights_replace_cached_casts(tmp_path):
    x = torch.randn(3, 2, 5, 5)
    expected = SmallNet()
    train(expected, TASK, RECIPE, folder=tmp_path)
    model = SmallNet()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.eval()(x)
        train(model, TASK, RECIPE, folder=tmp_path)  # it is finished, so its weights are only loaded
        found = model(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(found, expected.eval()(x))


def test_float16_skips_steps_that_overflow():
    """The scale starts so high that gradients overflow, and is halved until they do not."""
    model = nn.Linear(4, 1, bias=False)
    before = model.weight.detach().clone()
    weights = []

    def overflowing(m, step):
        weights.append(m.weight.detach().clone())
        return 100 * m(torch.full((2, 4), 10.0)).float().sum()

    recipe = Recipe(steps=12, lr=1e-6, precision="float16", momentum=0, nesterov=False, weight_decay=0)
    train(model, FunctionTask(loss=overflowing, score=lambda m, split: 0.0), recipe)
    assert torch.equal(weights[1], before)  # the first step was skipped
    assert not torch.equal(model.weight, before)


def test_float16_clips_the_unscaled_gradient():
    model = nn.Linear(4, 1, bias=False)
    before = model.weight.detach().clone()
    task = FunctionTask(loss=lambda m, step: m(torch.ones(1, 4)).float().sum() / 8, score=lambda m, split: 0.0)
    recipe = Recipe(steps=1, lr=0.5, precision="float16", momentum=0, nesterov=False, weight_decay=0, clip=0.125)
    train(model, task, recipe)  # the gradient has the norm 0.25
    assert torch.linalg.vector_norm(model.weight - before).item() == pytest.approx(0.5 * 0.125, rel=1e-3)


def test_float16_with_nan_gradients_is_detected():
    def hopeless(m, step):
        return m(torch.ones(1, 4)).sum() + (m.weight.sum() * 0).sqrt()

    task = FunctionTask(loss=hopeless, score=lambda m, split: 0.0)
    with pytest.raises(NotFinite, match=r"after step 60 of 60.*or compute in float32 instead of float16 \(precision="):
        train(nn.Linear(4, 1), task, Recipe(steps=60, precision="float16"))


def test_missing_accelerate_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "accelerate.state", None)
    with pytest.raises(MissingDependency, match=r"In a clone of depthfold, run: pip install -e .\.\[train\]."):
        train(SmallNet(), TASK, RECIPE)
    train(SmallNet(), TASK, RECIPE, device="cpu")  # not needed if the device is given


def test_number_of_threads_is_not_changed():
    before = torch.get_num_threads()
    train(SmallNet(), FunctionTask(loss=loss, score=score), RECIPE)
    assert torch.get_num_threads() == before
