"""recalibrate(): the statistics of batch norms are the means over the batches of all steps."""

from __future__ import annotations

import copy

import pytest
import timm.layers
import torch
import torch.nn.functional as F
from torch import nn

import depthfold as df
from depthfold.training import FunctionTask, Recipe, Step, recalibrate
from small_training import TASK, SmallNet, batch_of

RECIPE = Recipe(steps=1, batch=6, lr=0.1)


class Chain(nn.Module):
    """Two batch norms with a dropout between them; the second sees the normalised outputs of the first."""

    def __init__(self, norm=nn.BatchNorm2d):
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.norm1 = nn.Conv2d(2, 4, 3, padding=1, bias=False), norm(4)
        self.dropout = nn.Dropout(0.5)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3), norm(4)
        self.unused = nn.BatchNorm2d(4)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.weight, 0.5, 1.5)
                module.running_mean += 3
                module.num_batches_tracked += 5
        self.double()

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x)))
        return self.norm2(self.conv2(self.dropout(x))).mean((2, 3))[:, :3]


def loss(model, step):
    x, y = batch_of(step)
    return F.cross_entropy(model(x.double()), y)


CHAIN = FunctionTask(loss=loss, score=TASK.score)


def batches(seed, steps):
    """Return the batches of this many steps, from number 7 on."""
    return [batch_of(Step(number=number, seed=seed, recipe=RECIPE))[0].double() for number in range(7, 7 + steps)]


def means(maps):
    """Return the averages over the batches of the exact mean and of the exact unbiased variance per channel."""
    flat = [each.transpose(0, 1).flatten(1) for each in maps]
    size = flat[0].shape[1]
    average = sum(each.sum(1) / size for each in flat) / len(flat)
    variance = sum(((each - each.mean(1, keepdim=True)) ** 2).sum(1) / (size - 1) for each in flat) / len(flat)
    return average, variance


def normalised(x, norm):
    """Normalise with the statistics of the batch itself."""
    mean, variance = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), unbiased=False, keepdim=True)
    shape = (1, -1, 1, 1)
    return (x - mean) / (variance + norm.eps).sqrt() * norm.weight.view(shape) + norm.bias.view(shape)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, lambda n: timm.layers.BatchNormAct2d(n, apply_act=False)])
@torch.no_grad()
def test_statistics_are_the_means_over_all_batches(kind, training):
    model = Chain(kind).train(training)
    before = copy.deepcopy(model)
    random_state = torch.get_rng_state()
    recalibrate(model, CHAIN, RECIPE, steps=range(7, 10), seed=11)
    assert torch.equal(torch.get_rng_state(), random_state)
    first = [model.conv1(x) for x in batches(11, 3)]
    second = [model.conv2(F.relu(normalised(each, model.norm1))) for each in first]  # without dropout
    for norm, maps in ((model.norm1, first), (model.norm2, second)):
        mean, variance = means(maps)
        torch.testing.assert_close(norm.running_mean, mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(norm.running_var, variance, rtol=1e-12, atol=1e-12)
        assert norm.num_batches_tracked == 3
        assert norm.momentum == 0.1 and not norm._forward_pre_hooks
    assert [m.training for m in model.modules()] == [m.training for m in before.modules()]
    # Nothing else changes: neither weights nor a batch norm that the loss does not run.
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before.state_dict()[name])}
    parts = ("running_mean", "running_var", "num_batches_tracked")
    assert changed == {f"{norm}.{part}" for norm in ("norm1", "norm2") for part in parts}


@torch.no_grad()
def test_norm_that_is_called_twice_averages_over_all_calls():
    def twice(model, step):
        x, y = batch_of(step)
        return F.cross_entropy(model(x.double()), y) + F.cross_entropy(model(2 * x.double() + 1), y)

    model = Chain()
    recalibrate(model, FunctionTask(loss=twice, score=TASK.score), RECIPE, steps=range(7, 9), seed=3)
    both = [model.conv1(view) for x in batches(3, 2) for view in (x, 2 * x + 1)]
    torch.testing.assert_close(model.norm1.running_mean, means(both)[0], rtol=1e-12, atol=1e-12)
    assert model.norm1.num_batches_tracked == 4


def test_frozen_norms_keep_their_statistics():
    model = Chain().train()
    model.norm1.eval()
    before = copy.deepcopy(model)
    recalibrate(model, CHAIN, RECIPE, steps=range(7, 9), seed=0)
    assert torch.equal(model.norm1.running_mean, before.norm1.running_mean)
    assert not torch.equal(model.norm2.running_mean, before.norm2.running_mean)
    assert model.training and not model.norm1.training

    untracked = Chain().eval()
    untracked.norm1 = nn.BatchNorm2d(4, track_running_stats=False).double()
    recalibrate(untracked, CHAIN, RECIPE, steps=range(7, 9), seed=0)
    assert untracked.norm1.running_mean is None


class Functional(nn.Module):
    """Calls its batch norm as a function."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        norm = self.norm
        x = F.batch_norm(
            self.conv(x), norm.running_mean, norm.running_var, norm.weight, norm.bias, self.training, 0.3, norm.eps
        )
        return self.head(F.relu(x).mean((2, 3)))


@torch.no_grad()
def test_functional_batch_norms_of_a_traced_network():
    model = Functional().double()
    traced = df.trace(model.train(), torch.zeros(2, 2, 5, 5, dtype=torch.float64))
    student = df.rewrite(traced, traced.vanilla)
    recalibrate(student, CHAIN, RECIPE, steps=range(7, 10), seed=4)
    mean, variance = means([model.conv(x) for x in batches(4, 3)])
    state = student.state_dict()
    torch.testing.assert_close(state["norm.running_mean"], mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state["norm.running_var"], variance, rtol=1e-12, atol=1e-12)


def test_result_depends_on_the_seed_alone():
    def statistics(seed):
        torch.manual_seed(seed + 100)
        model = SmallNet()
        recalibrate(model, TASK, RECIPE.replace(precision="bfloat16", channels_last=True), steps=range(7, 9), seed=seed)
        return model.norm.running_mean

    assert torch.equal(statistics(1), statistics(1))
    assert not torch.equal(statistics(1), statistics(2))
