"""The training loop against a plain loop of twenty lines, and against hand computations."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from depthfold.errors import InvalidValue, NotFinite
from depthfold.training import FunctionTask, Recipe, Step, derive_seed, train
from depthfold.training.metrics import Point
from small_training import TASK, SmallNet, batch_of, equal, loss, score

RECIPE = Recipe(steps=12, batch=8, lr=0.1, weight_decay=1e-3, warmup=3, clip=0.5)


def plain_loop(model, recipe, seed, teacher=None, evaluated=()):
    """Train as the recipe says, independently of the package."""
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=1.0, momentum=0.9, nesterov=True, weight_decay=1e-3
    )
    model.train()
    for name in evaluated:
        model.get_submodule(name).eval()
    for number in range(12):
        rate = (number + 1) / 4 if number < 3 else (1 + math.cos(math.pi * (number - 3) / 9)) / 2
        optimizer.param_groups[0]["lr"] = recipe.lr * rate
        torch.manual_seed(derive_seed(seed, "step", number, 0))
        optimizer.zero_grad()
        loss(model, Step(number=number, seed=seed, recipe=recipe, teacher=teacher)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return model


def test_weights_match_a_plain_loop():
    ours = SmallNet()
    trained = train(ours, TASK, RECIPE, seed=5)
    plain = plain_loop(SmallNet(), RECIPE, seed=5)
    assert equal(ours, plain)
    assert not equal(ours, SmallNet())
    assert trained.steps == 12
    assert trained.score == score(plain.eval(), "holdout")


def test_seed_determines_the_weights():
    one, two, recipes = SmallNet(), SmallNet(), SmallNet()
    train(one, TASK, RECIPE, seed=1)
    train(two, TASK, RECIPE, seed=2)
    train(recipes, TASK, RECIPE.replace(seed=2))
    assert not equal(one, two)
    assert equal(two, recipes)


def test_existing_gradients_are_ignored():
    dirty, clean = SmallNet(), SmallNet()
    for parameter in dirty.parameters():
        parameter.grad = torch.ones_like(parameter)
    train(dirty, TASK, RECIPE)
    train(clean, TASK, RECIPE)
    assert equal(dirty, clean)
    assert all(p.grad is None for p in dirty.parameters() if p.requires_grad)


def test_frozen_parameters_do_not_change():
    model = SmallNet()
    before = copy.deepcopy(model.frozen.state_dict())
    train(model, TASK, RECIPE)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.frozen.state_dict().items())
    assert [p.requires_grad for p in model.frozen.parameters()] == [False, False]


def test_teacher_is_used_and_restored():
    teacher = SmallNet(seed=9)
    teacher.norm.eval()  # in a model in training mode
    before, modes = copy.deepcopy(teacher), [module.training for module in teacher.modules()]
    seen = []

    def watching(model, step):
        seen.append((teacher.training, torch.is_grad_enabled(), step.teacher(batch_of(step)[0]).requires_grad))
        return loss(model, step)

    taught = SmallNet()
    train(taught, FunctionTask(loss=watching, score=score), RECIPE, teacher=teacher)
    assert seen == [(False, True, False)] * 12
    assert [module.training for module in teacher.modules()] == modes
    assert equal(teacher, before)
    alone = SmallNet()
    train(alone, TASK, RECIPE)
    assert not equal(taught, alone)
    assert equal(taught, plain_loop(SmallNet(), RECIPE, seed=0, teacher=lambda x: before.eval()(x).detach()))


def test_teacher_that_shares_parameters_is_refused():
    model = SmallNet()
    with pytest.raises(InvalidValue, match=r"^The teacher shares parameters with the model that it teaches"):
        train(model, TASK, RECIPE, teacher=nn.Sequential(model.conv))
    with pytest.raises(InvalidValue, match=r"^The teacher must be an nn.Module, found function.$"):
        train(model, TASK, RECIPE, teacher=loss)


def test_averaged_weights_match_hand_computation():
    weights = []

    def watching(model, step):
        weights.append(copy.deepcopy(model))
        return loss(model, step)

    averaged = SmallNet()
    trained = train(averaged, FunctionTask(loss=watching, score=score), RECIPE.replace(ema=0.8))
    last = SmallNet()
    train(last, TASK, RECIPE)
    weights.append(last)
    for name, found in averaged.named_parameters():
        expected = weights[0].get_parameter(name).double()
        for model in weights[1:]:
            expected = 0.8 * expected + 0.2 * model.get_parameter(name).double()
        assert torch.allclose(found.double(), expected, atol=1e-6), name
    assert not torch.allclose(averaged.conv.weight, last.conv.weight, atol=1e-4)
    assert torch.equal(averaged.norm.running_mean, last.norm.running_mean)
    assert trained.score == score(averaged.eval(), "holdout")  # the averaged weights are scored


def test_gradient_is_clipped():
    model = nn.Linear(3, 1, bias=False)
    before = model.weight.detach().clone()
    task = FunctionTask(loss=lambda m, step: 1000 * m(torch.ones(1, 3)).sum(), score=lambda m, split: 0.0)
    recipe = Recipe(steps=1, lr=0.25, momentum=0, nesterov=False, weight_decay=0, clip=2.0)
    train(model, task, recipe)
    assert torch.linalg.vector_norm(model.weight - before).item() == pytest.approx(0.25 * 2.0, rel=1e-4)


def test_learning_curve_and_best_weights():
    scores = iter([0.1, 0.7, 0.3, 0.6, 0.2, 0.65])
    kept = {}

    def scoring(model, split):
        assert split == "test"
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
        value = next(scores)
        kept[value] = copy.deepcopy(model)
        return value

    model = SmallNet()
    task = FunctionTask(loss=loss, score=scoring)
    trained = train(model, task, RECIPE.replace(evaluate=4, keep="best"), split="test")
    assert [(point.step, point.score) for point in trained.curve] == [(4, 0.1), (8, 0.7), (12, 0.3)]
    assert trained.best == trained.curve[1]
    assert trained.score == 0.7
    assert equal(model, kept[0.7])
    again = train(SmallNet(), task, RECIPE.replace(evaluate=4), split="test")
    assert (again.score, again.best.score) == (0.65, 0.65)
    assert isinstance(again.best, Point)
    assert again.loss == again.curve[-1].loss == trained.loss


def test_training_without_a_split_is_not_scored():
    task = FunctionTask(loss=loss, score=lambda model, split: pytest.fail("scored"))
    trained = train(SmallNet(), task, RECIPE.replace(evaluate=2), split=None)
    assert (trained.score, trained.best, trained.curve) == (None, None, ())


def test_modes_are_restored_and_batch_norms_are_trained():
    model = SmallNet().eval()
    model.dropout.train()
    modes = [module.training for module in model.modules()]
    train(model, TASK, RECIPE)
    assert [module.training for module in model.modules()] == modes
    assert model.norm.num_batches_tracked.item() == 12


@pytest.mark.parametrize("changes", [{}, {"ema": 0.5}, {"evaluate": 3}], ids=str)
def test_parts_in_evaluation_mode_stay_so_in_a_training_model(changes):
    model, plain = SmallNet(), SmallNet()
    for part in (model.norm, model.dropout):
        part.eval()
    modes = [module.training for module in model.modules()]
    train(model, TASK, RECIPE.replace(**changes))
    assert model.norm.num_batches_tracked.item() == 0
    assert torch.equal(model.norm.running_mean, torch.zeros(4))
    assert [module.training for module in model.modules()] == modes
    if "ema" not in changes:
        assert equal(model, plain_loop(plain, RECIPE, seed=0, evaluated=("norm", "dropout")))


def test_global_random_state_is_restored():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    train(SmallNet(), TASK, RECIPE)
    with pytest.raises(RuntimeError, match="mine"):
        train(SmallNet(), FunctionTask(loss=_raise, score=score), RECIPE)
    assert torch.equal(torch.rand(4), expected)


def _raise(model, step):
    raise RuntimeError("mine")


def test_training_works_inside_no_grad():
    one, two = SmallNet(), SmallNet()
    train(one, TASK, RECIPE)
    with torch.no_grad():
        train(two, TASK, RECIPE)
    assert equal(one, two)


def test_channels_last_is_undone_afterwards():
    formats = []

    def watching(model, step):
        formats.append(model.conv.weight.is_contiguous(memory_format=torch.channels_last))
        return loss(model, step)

    model = SmallNet()
    train(model, FunctionTask(loss=watching, score=score), RECIPE.replace(channels_last=True))
    assert formats == [True] * 12
    assert model.conv.weight.is_contiguous()


def test_channels_last_of_volumes():
    formats, model = [], nn.Sequential(nn.Conv3d(2, 3, 3), nn.Flatten(2), nn.Unflatten(2, (3, 9)), nn.Conv2d(3, 2, 3))

    def watching(model, step):
        formats.append(model[0].weight.is_contiguous(memory_format=torch.channels_last_3d))
        formats.append(model[3].weight.is_contiguous(memory_format=torch.channels_last))
        return model(torch.ones(2, 2, 5, 5, 5)).mean()

    task = FunctionTask(loss=watching, score=lambda model, split: 0.0)
    train(model, task, RECIPE.replace(channels_last=True))
    assert formats == [True] * 24
    assert model[0].weight.is_contiguous()


def test_nan_loss_stops_the_training():
    def breaking(model, step):
        return loss(model, step) * (math.nan if step.number == 6 else 1)

    with pytest.raises(NotFinite) as caught:
        train(SmallNet(), FunctionTask(loss=breaking, score=score), Recipe(steps=10, batch=8, lr=0.5))
    assert caught.value.step == 7
    assert caught.value.lr == pytest.approx(0.25 * (1 + math.cos(math.pi * 0.6)))
    assert str(caught.value) == (
        "The loss is nan at step 7 of 10, with the learning rate 0.1727. Use a smaller learning rate than 0.5 (lr), "
        "or raise it slowly at first (warmup), or limit the norm of the gradient (clip)."
    )


def test_nan_weights_after_the_last_step_are_detected():
    def breaking(model, step):
        value = loss(model, step)
        if step.number == 3:  # a finite loss whose gradient is not
            value = value + (model.mix.bias.sum() * 0).sqrt().sum()
        return value

    with pytest.raises(NotFinite, match=r"^The weights are not finite after step 4 of 4, with the learning rate"):
        train(SmallNet(), FunctionTask(loss=breaking, score=score), Recipe(steps=4, batch=8))


class Masked(SmallNet):
    """A network with a constant mask, as in attention."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))


@pytest.mark.parametrize("recipe", [RECIPE, RECIPE.replace(ema=0.5), RECIPE.replace(precision="float16")])
def test_constant_of_minus_infinity_is_not_a_divergence(recipe, tmp_path):
    masked, plain = Masked(), SmallNet()
    train(masked, TASK, recipe, folder=tmp_path)
    train(plain, TASK, recipe)
    assert torch.equal(masked.mask, torch.tensor([0.0, -math.inf]))
    assert torch.equal(masked.conv.weight, plain.conv.weight)

    def breaking(model, step):
        return loss(model, step) + (model.mix.bias.sum() * 0).sqrt()  # a finite loss whose gradient is not

    if recipe.precision == "float32":  # float16 skips such steps
        with pytest.raises(NotFinite, match=r"^The weights are not finite after step 1 of 1"):
            train(Masked(), FunctionTask(loss=breaking, score=score), Recipe(steps=1, batch=8))


def test_nan_score_is_refused():
    task = FunctionTask(loss=loss, score=lambda model, split: math.nan)
    with pytest.raises(NotFinite, match=r"^The task's score is nan after step 12 of 12, expected a finite number"):
        train(SmallNet(), task, RECIPE)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda model: 1.0, "The task's loss must be a tensor with a single number, found float."),
        (lambda model: model.conv.weight, "The task's loss must be a tensor with a single number, found a tensor of"),
        (
            lambda model: torch.tensor(1.0),
            "The task's loss has no gradient: it does not depend on the model's parameters",
        ),
    ],
)
def test_loss_without_a_gradient_is_refused(value, message):
    with pytest.raises(InvalidValue, match=message):
        train(SmallNet(), FunctionTask(loss=lambda model, step: value(model), score=score), RECIPE)


def test_wrong_arguments_are_refused(tmp_path):
    with pytest.raises(InvalidValue, match=r"^train\(\) takes an nn.Module, found str.$"):
        train("model", TASK, RECIPE)
    with pytest.raises(
        InvalidValue, match=r"^A task has the methods loss, score and steps_per_epoch; object lacks one"
    ):
        train(SmallNet(), object(), RECIPE)
    with pytest.raises(InvalidValue, match=r"^train\(\) takes a Recipe, found 'quick'."):
        train(SmallNet(), TASK, "quick")
    with pytest.raises(InvalidValue, match=r"^No parameter of the model requires a gradient"):
        train(SmallNet().requires_grad_(False), TASK, RECIPE)
    with pytest.raises(InvalidValue, match=r"^TensorBoard's files are written into the folder of the training"):
        train(SmallNet(), TASK, RECIPE, tensorboard=True)
    with pytest.raises(InvalidValue, match=r"^The folder of a training run must be a path, found 5. Pass a string or"):
        train(SmallNet(), TASK, RECIPE, folder=5)
    with pytest.raises(InvalidValue, match=r"^There is no device 'gpu': .* Use one such as \"cpu\" or \"cuda:0\".$"):
        train(SmallNet(), TASK, RECIPE, device="gpu")


def test_progress_is_called_for_every_step():
    calls, ticks = [], []

    def progress(what, total, done):
        calls.append((what, total, done))
        return lambda: ticks.append(1)

    train(SmallNet(), TASK, RECIPE, progress=progress)
    assert (calls, len(ticks)) == ([("steps", 12, 0)], 12)
