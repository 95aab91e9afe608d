"""Method "local", compared with a plain training loop over hand-written blocks in float64."""

from __future__ import annotations

import copy
import math

import pytest
import timm.layers
import torch
import torch.nn.functional as F
from torch import nn

import depthfold as df
from depthfold.core import BlockOption, Drops, FlaggedSpan, Span
from depthfold.errors import InvalidValue, TableError
from depthfold.importance import IncompleteTable, importance_plan, importance_student, measure_importance
from depthfold.importance.local import train_locally
from depthfold.training import FunctionTask, Recipe, recalibrate
from tiny_importance import RECIPE, SIZE, Pair, Tiny, TinyTask, batch, holdout_score, images, tiny_network

LOCAL = Recipe(steps=5, batch=4, lr=0.02, seed=5)
INPUTS = torch.zeros(1, 2, SIZE, SIZE)


def loss(model, step):
    x, y = batch(step.seed, step.number)
    return F.cross_entropy(model(x.double()), y)


@torch.no_grad()
def score(model, split):
    x, y = images(8, 77)
    return -F.cross_entropy(model(x.double()), y).item()


TASK = FunctionTask(loss=loss, score=score)
NET = Tiny().double().eval()
TRACED = df.trace(Tiny().double(), INPUTS.double())


@torch.no_grad()
def maps(x):
    """Return the values of the original at all positions."""
    net, found = NET, [x]
    found.append(F.relu(net.norm1(net.conv1(x))))
    found.append(F.relu(net.norm2(net.conv2(found[1]))))
    found.append(net.norm3(net.conv3(found[2])) + found[1])
    found.append(F.relu(net.norm4(net.conv4(found[3]))))
    found.append(net.norm5(net.conv5(found[4])))
    return found


def layer(net, l, x, padding):
    """Return convolution l with other padding, normalised with the statistics of the batch."""
    conv, norm = getattr(net, f"conv{l}"), getattr(net, f"norm{l}")
    x = F.conv2d(x, conv.weight, conv.bias, conv.stride, padding)
    mean, variance = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), unbiased=False, keepdim=True)
    return (x - mean) / (variance + norm.eps).sqrt() * norm.weight.view(1, -1, 1, 1) + norm.bias.view(1, -1, 1, 1)


# What the layers of some blocks compute, by hand, from the values at all positions. The fifth part of a key has the
# dropped layers.
BLOCKS = {
    # The padding of all three layers is before the first, so the skip is cropped. An activation is inserted at the end.
    (0, 3, 1, 1): lambda net, x: F.relu(
        layer(net, 3, layer(net, 2, first := layer(net, 1, x[0], 3), 0), 0) + first[..., 2:-2, 2:-2]
    ),
    # The residual is inside the block.
    (1, 3, 1, 0): lambda net, x: layer(net, 3, layer(net, 2, x[1], 2), 0) + x[1],
    # The residual begins before the block, and an activation is inserted after the addition.
    (2, 3, 1, 1): lambda net, x: F.relu(layer(net, 3, x[2], 1) + x[1]),
    # Activations are inserted at both ends.
    (3, 5, 1, 1): lambda net, x: F.relu(layer(net, 5, layer(net, 4, F.relu(x[3]), 1), 0)),
    (1, 3, 1, 0, 2): lambda net, x: layer(net, 3, x[1], 1) + x[1],
    (0, 3, 1, 1, 3): lambda net, x: F.relu(layer(net, 2, first := layer(net, 1, x[0], 2), 0) + first[..., 1:-1, 1:-1]),
    (0, 3, 1, 1, 2, 3): lambda net, x: F.relu(2 * layer(net, 1, x[0], 1)),
    (3, 5, 0, 1, 5): lambda net, x: F.relu(layer(net, 4, x[3], 1)),
}
LAYERS = {
    (0, 3, 1, 1): (1, 2, 3), (1, 3, 1, 0): (2, 3), (2, 3, 1, 1): (3,), (3, 5, 1, 1): (4, 5), (1, 3, 1, 0, 2): (3,),
    (0, 3, 1, 1, 3): (1, 2), (0, 3, 1, 1, 2, 3): (1,), (3, 5, 0, 1, 5): (4,),
}  # fmt: skip


def option(key):
    return BlockOption(FlaggedSpan(*key[:2], *map(bool, key[2:4])), Drops(key[4:]))


def train_by_hand(key, steps, seed):
    """Return the network whose block was trained by Adam, written out, and the last loss."""
    net, j = copy.deepcopy(NET), key[1]
    parameters = [p for l in LAYERS[key] for part in ("conv", "norm") for p in getattr(net, f"{part}{l}").parameters()]
    first, second = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    for n in range(steps):
        x = maps(batch(seed, n)[0].double())
        error = ((BLOCKS[key](net, x) - x[j]) ** 2).mean() / (x[j] ** 2).mean()
        gradients = torch.autograd.grad(error, parameters)
        lr = LOCAL.lr * 0.5 * (1 + math.cos(math.pi * n / steps))
        with torch.no_grad():
            for p, g, m, v in zip(parameters, gradients, first, second, strict=True):
                m.copy_(0.9 * m + 0.1 * g)
                v.copy_(0.999 * v + 0.001 * g * g)
                p -= lr * (m / (1 - 0.9 ** (n + 1))) / ((v / (1 - 0.999 ** (n + 1))).sqrt() + 1e-8)
    return net, error.item()


def students(keys):
    return {
        (one := option(key)): importance_student(TRACED, one.block, 0, dropped=one.dropped, reinit=False)
        for key in keys
    }


def test_blocks_are_trained_as_by_hand():
    made = students(BLOCKS)
    losses = train_locally(TRACED, made, TASK, LOCAL, seed=5)
    for key in BLOCKS:
        net, error = train_by_hand(key, LOCAL.steps, seed=5)
        assert losses[option(key)] == pytest.approx(error, rel=1e-10)
        trained, before = dict(made[option(key)].named_parameters()), dict(NET.named_parameters())
        gone = {f"{part}{l}" for l in key[4:] for part in ("conv", "norm")}
        assert before.keys() - trained.keys() == {name for name in before if name[:5] in gone}
        for name, wanted in net.named_parameters():
            if name[:5] in gone:
                continue
            # A batch norm removes these biases, so their gradients are only rounding, which Adam divides by 1e-8.
            atol = 1e-7 if name in ("conv2.bias", "norm2.bias", "norm4.bias") else 1e-11
            torch.testing.assert_close(trained[name], wanted, rtol=1e-9, atol=atol)
            inside = name[:5] in {f"{part}{l}" for l in LAYERS[key] for part in ("conv", "norm")}
            assert inside != torch.equal(trained[name], before[name])


def test_block_without_layers_is_not_trained():
    branch = BlockOption(FlaggedSpan(1, 3, True, False), Drops(branches=[Span(1, 3)]))
    student = importance_student(TRACED, branch.block, 0, dropped=branch.dropped, reinit=False)
    assert train_locally(TRACED, {branch: student}, TASK, LOCAL, seed=5) == {branch: 0.0}
    before = dict(NET.named_parameters())
    assert all(torch.equal(value, before[name]) for name, value in student.named_parameters())
    with torch.no_grad():
        x = images(4, 3)[0].double()
        wanted = NET.head(NET.norm5(NET.conv5(F.relu(NET.norm4(NET.conv4(maps(x)[1]))))).mean((2, 3)))
        torch.testing.assert_close(student.eval()(x), wanted)


def test_score_is_that_of_the_recalibrated_network():
    (key, student), *_ = students([(1, 3, 1, 0)]).items()
    train_locally(TRACED, {key: student}, TASK, LOCAL, seed=5)
    recalibrate(student, TASK, LOCAL, steps=range(5, 9), seed=5)
    table = measure_importance(TRACED, TASK, LOCAL, method="local")
    entries = {entry.span: entry for entry in table.entries}
    assert entries[key.block].samples == (score(student.eval(), "holdout"),)
    # Single layers with the network's own activations change nothing, so only their batch norms are recalibrated.
    unchanged = df.rewrite(TRACED, TRACED.vanilla)
    recalibrate(unchanged, TASK, LOCAL, steps=range(5, 9), seed=5)
    for ends in ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5)):
        a, b = ends[0] != 3, ends[1] not in (3, 5)
        assert entries[FlaggedSpan(*ends, a, b)].samples == (score(unchanged.eval(), "holdout"),)
    assert entries[FlaggedSpan(2, 3, True, True)].samples != entries[FlaggedSpan(3, 4, True, True)].samples


def test_training_of_a_block_does_not_depend_on_the_others():
    together, alone = students(BLOCKS), {}
    train_locally(TRACED, together, TASK, LOCAL, seed=5)
    for key, student in students(BLOCKS).items():
        train_locally(TRACED, {key: student}, TASK, LOCAL, seed=5)
        alone[key] = student
    for key in together:
        for name, value in together[key].state_dict().items():
            assert torch.equal(value, alone[key].state_dict()[name])


def test_students_share_the_memory_of_what_is_not_trained():
    made = students(BLOCKS)
    train_locally(TRACED, made, TASK, LOCAL, seed=5)
    one, two = (made[option(key)] for key in ((0, 3, 1, 1), (3, 5, 1, 1)))
    assert one.head.weight.data_ptr() == two.head.weight.data_ptr() != TRACED.graph.head.weight.data_ptr()
    assert one.conv5.weight.data_ptr() != two.conv5.weight.data_ptr()
    assert one.norm5.running_mean.data_ptr() != two.norm5.running_mean.data_ptr()  # recalibration changes them


class Whole(nn.Module):
    """Only the body is traced. It is followed by a dropout."""

    def __init__(self, body, drop):
        super().__init__()
        self.body, self.dropout = body, nn.Dropout(drop)

    def forward(self, x):
        return self.dropout(self.body(x))


class Fused(Pair):
    """The activations are inside the batch norms."""

    def __init__(self):
        super().__init__(timm.layers.BatchNormAct2d)

    def forward(self, x):
        return self.head(self.norm2(self.conv2(self.norm1(self.conv1(x)))).mean((2, 3)))


class Functional(Pair):
    """Everything is called as a function, with a dropout between the layers and activations in place."""

    drop = 0.0

    def norm(self, x, norm):
        mean, variance = norm.running_mean, norm.running_var
        return F.batch_norm(x, mean, variance, norm.weight, norm.bias, self.training, 0.1, norm.eps)

    def forward(self, x):
        x = F.relu_(self.norm(F.conv2d(x, self.conv1.weight, None, 1, 1), self.norm1))
        x = F.dropout(x, self.drop, self.training)
        x = F.relu_(self.norm(F.conv2d(x, self.conv2.weight, None, 1, 1), self.norm2))
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("method", ["brief", "recalibrated", "local", "fit"])
def test_kinds_of_networks_have_the_same_importances(method):
    def table(model, **options):
        torch.manual_seed(0)
        traced = df.trace(model, INPUTS, **options)
        return measure_importance(traced, TinyTask(), RECIPE, method=method)

    def made(kind):
        torch.manual_seed(0)
        model = kind().train()
        for norm in (model.norm1, model.norm2):
            norm.running_mean.zero_()  # so that about half of the values are negative
        return model

    right = table(made(Pair))
    assert len(set(right.importances.values())) == 2  # the two single layers change nothing
    drop = 0.0 if method == "brief" else 0.5  # all others leave dropout out
    functional = made(Functional)
    functional.drop = drop
    for model, options in ((made(Fused), {}), (functional, {}), (Whole(made(Pair), drop), {"at": "body"})):
        found = table(model, **options)
        assert found.base == pytest.approx(right.base)
        for entry, other in zip(found.entries, right.entries, strict=True):
            assert entry.mean == pytest.approx(other.mean, abs=1e-5)


def test_frozen_parts_stay_frozen():
    model = Pair().train()
    model.norm1.eval()
    model.conv2.requires_grad_(False)
    traced = df.trace(model, INPUTS)
    key = FlaggedSpan(0, 2, True, True)
    student = importance_student(traced, key, 0, reinit=False)
    train_locally(traced, {BlockOption(key): student}, TinyTask(), RECIPE, seed=5)
    recalibrate(student, TinyTask(), RECIPE, steps=range(3), seed=5)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(student.state_dict()[name], value)}
    norm2 = {f"norm2.{part}" for part in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
    assert changed == {"conv1.weight", "norm1.weight", "norm1.bias", *norm2}
    assert student.training and not student.norm1.training and student.norm2.training


def test_block_without_trainable_parameters_is_only_recalibrated():
    traced = df.trace(Pair().requires_grad_(False), INPUTS)
    table = measure_importance(traced, TinyTask(), RECIPE, method="local")

    def recalibrated(plan):
        student = df.rewrite(traced, plan)
        recalibrate(student, TinyTask(), RECIPE, steps=range(3, 7), seed=RECIPE.seed)
        return holdout_score(student.eval())

    assert len(table.importances) == 3
    for entry in table.entries:
        assert entry.samples == (recalibrated(importance_plan(traced.network, entry.span)),)
    assert table.base == recalibrated(traced.vanilla)


def test_global_random_state_is_preserved():
    traced = df.trace(Pair(), INPUTS)
    before = torch.get_rng_state()
    for method in ("brief", "local", "fit"):
        measure_importance(traced, TinyTask(), RECIPE, method=method)
        assert torch.equal(torch.get_rng_state(), before)


def test_a_task_that_cannot_serve_the_method_is_an_error():
    def penalised(model, step):
        x, y = batch(step.seed, step.number)
        value = F.cross_entropy(model(x.requires_grad_()), y)
        return value + torch.autograd.grad(value, x, create_graph=True)[0].square().sum()

    task = FunctionTask(loss=penalised, score=TinyTask().score)
    traced = df.trace(Pair(), INPUTS)
    assert measure_importance(traced, task, RECIPE, method="trained").importances
    for method in ("brief", "recalibrated", "local", "fit"):
        with pytest.raises(
            TableError, match="The task's loss computes gradients itself, so it cannot run without them"
        ) as raised:
            measure_importance(traced, task, RECIPE, method=method)
        assert str(raised.value).count('The method "trained" does not need that (--method trained)') == 1


class Detector(nn.Module):
    """As detectors do, it returns losses only in training mode."""

    def __init__(self):
        super().__init__()
        self.body = Pair()

    def forward(self, x, y=None):
        found = self.body(x)
        if y is None:
            return found
        return {"loss": F.cross_entropy(found, y)} if self.training else [found]


def loss_in_training_mode(model, step):
    return model(*batch(step.seed, step.number))["loss"]


def loss_without_a_teacher(model, step):
    assert step.teacher is None
    return TinyTask().loss(model, step)


@pytest.mark.parametrize(
    ("loss", "method", "needs"),
    [
        (loss_in_training_mode, "brief", "evaluation mode and with a teacher"),
        (loss_in_training_mode, "recalibrated", "evaluation mode"),
        (loss_without_a_teacher, "brief", "evaluation mode and with a teacher"),
    ],
)
def test_a_loss_that_can_only_be_trained_with_needs_the_method_trained(loss, method, needs):
    task = FunctionTask(loss=loss, score=TinyTask().score)
    traced = df.trace(Detector(), INPUTS, at="body")
    assert len(measure_importance(traced, task, RECIPE, method="trained").importances) == 3
    with pytest.raises(TableError) as raised:
        measure_importance(traced, task, RECIPE, method=method)
    said = (
        f'). With the method "{method}", the loss also runs on a network in {needs}, which "trained" does not need '
        "(--method trained). Correct the task or its data, and run again."
    )
    assert str(raised.value).endswith(said)


@pytest.mark.parametrize("method", ["brief", "recalibrated"])
def test_a_loss_that_fails_in_trainings_too_does_not_recommend_them(method):
    def other_channels(model, step):
        return model(torch.ones(4, 7, 5, 5)).sum()

    task = FunctionTask(loss=other_channels, score=TinyTask().score)
    with pytest.raises(TableError, match="7 channels") as raised:
        measure_importance(df.trace(Pair(), INPUTS), task, RECIPE, method=method)
    assert "--method" not in str(raised.value)


@pytest.mark.parametrize("method", ["brief", "recalibrated"])
def test_a_score_that_fails_says_nothing_about_the_loss(method):
    task = FunctionTask(loss=TinyTask().loss, score=lambda *_: {}["missing"])
    with pytest.raises(TableError, match="KeyError: 'missing'") as raised:
        measure_importance(df.trace(Pair(), INPUTS), task, RECIPE, method=method)
    assert "the loss" not in str(raised.value) and "--method" not in str(raised.value)


def test_a_loss_that_does_not_run_the_traced_part_is_an_error():
    class TwoParts(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.other = Pair(), nn.Linear(3, 3)

        def forward(self, x):
            return self.body(x)

    traced = df.trace(TwoParts(), INPUTS, at="body")
    task = FunctionTask(loss=lambda model, step: model.other(torch.ones(2, 3)).sum(), score=TinyTask().score)
    for method in ("local", "fit"):
        with pytest.warns(IncompleteTable, match="1 block of 3 .*\n.*does not run the traced part of the model"):
            measure_importance(traced, task, RECIPE, method=method)


def test_float16_is_refused():
    with pytest.raises(InvalidValue, match=r'"local" does not scale its losses, so float16 gradients would vanish'):
        measure_importance(tiny_network(), TinyTask(), RECIPE.replace(precision="float16"), method="local")
