"""Subclasses of known modules, and other classes with their names, are not recognised by name alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import depthfold as df
from nets import codes, conv, folds_exactly, image


def between(part):
    return nn.Sequential(conv(), part, conv())


class AlwaysOn(nn.Dropout):
    """Monte Carlo dropout."""

    def forward(self, x):
        return F.dropout(x, self.p, True)


class Doubling(nn.Identity):
    def forward(self, x):
        return x * 2


class StochasticDepth(nn.Module):
    """Scales by the survival probability in evaluation, as in the paper."""

    def forward(self, x):
        return x if self.training else x * 0.8


class DropPath(nn.Module):
    def forward(self, x):
        return x * 0.5 if x.shape[0] else x


class OwnFrozenNorm(nn.Module):
    """The frozen batch norm of DETR, with epsilon in its forward."""

    def __init__(self):
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.rand(4) + 0.5)

    def forward(self, x):
        weight, bias, mean, variance = (
            tensor.reshape(1, -1, 1, 1) for tensor in (self.weight, self.bias, self.running_mean, self.running_var)
        )
        scale = weight * (variance + 1e-5).rsqrt()
        return x * scale + (bias - mean * scale)


OwnFrozenNorm.__name__ = "FrozenBatchNorm2d"


class BatchNormAct2d(nn.BatchNorm2d):
    """A class with the name of a timm class that applies its activation before the norm."""

    def __init__(self, channels):
        super().__init__(channels)
        self.act = nn.ReLU()

    def forward(self, x):
        return super().forward(self.act(x))


@pytest.mark.parametrize(
    ("part", "where", "code"),
    [
        (DropPath(), "1", "opaque"),
        (OwnFrozenNorm(), "1.mul", "multiplication"),
        (BatchNormAct2d(4), "1", "norm-alone"),
    ],
    ids=lambda given: type(given).__name__ if isinstance(given, nn.Module) else "",
)
def test_subclass_or_class_of_the_same_name_is_a_barrier(part, where, code):
    traced = folds_exactly(between(part), image())
    assert traced.network.barriers == (1,)
    assert {each.code for each in traced.network.refusals if each.position == 1} == {code}
    assert codes(traced)[where] == code


@pytest.mark.parametrize("part", [Doubling(), StochasticDepth()])
def test_factor_in_a_class_of_the_same_name_is_part_of_the_layer(part):
    assert folds_exactly(between(part), image()).network.barriers == ()


def test_dropout_subclass_that_is_always_active_stays_active():
    model = between(AlwaysOn(0.5)).double().eval()
    x = image().double()
    traced = df.trace(model, x)
    assert traced.network.barriers == (1,)
    assert {each.code for each in traced.network.refusals if each.position == 1} == {"always-random"}
    student = df.rewrite(traced, df.Plan((), (1,)))
    for made in (student.eval(), df.merge(student)):
        assert not torch.equal(made(x), made(x))
        torch.manual_seed(0)
        found = made(x)
        torch.manual_seed(0)
        assert torch.allclose(found, model(x))


class Renamed(nn.Dropout):
    """A subclass without changes."""


class Nothing(nn.Identity):
    pass


@pytest.mark.parametrize("part", [Renamed(0.5), Nothing()], ids=lambda part: type(part).__name__)
def test_subclass_with_an_inherited_forward_is_a_no_op(part):
    assert folds_exactly(between(part), image()).network.barriers == ()


class OwnDropPath(nn.Module):
    """A custom drop-path: random in training, the identity in evaluation."""

    def __init__(self, rate=0.5):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        if self.rate == 0 or not self.training:
            return x
        keep = torch.rand(x.shape[0], 1, 1, 1) > self.rate
        return x * keep / (1 - self.rate)


class WithDropPath(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.first, self.branch, self.drop, self.last = conv(), conv(), drop, conv()

    def forward(self, x):
        x = self.first(x)
        return self.last(torch.relu(x + self.drop(self.branch(x))))


@pytest.mark.parametrize("drop", [OwnDropPath(), type("Mine", (OwnDropPath,), {})(), nn.Sequential(OwnDropPath())])
def test_custom_drop_path_is_kept_for_training_and_removed_by_merging(drop):
    model = WithDropPath(drop).train()
    traced = df.trace(model, image())
    assert traced.network.barriers == () and len(traced.network.skips) == 1
    student = df.rewrite(traced, traced.vanilla)
    one, two = (student(image(batch=8)) for _ in range(2))
    assert not torch.equal(one, two)
    folds_exactly(model, image())
    assert not hasattr(next(iter(drop.modules())), "depthfold_no_op")  # the user's module is not changed
