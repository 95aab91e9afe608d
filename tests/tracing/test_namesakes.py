"""Subclasses and namesakes of the modules that we know: what they compute is theirs, so we look at it."""

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
    """Scales by the chance to survive when it does not drop, as the paper of this name does."""

    def forward(self, x):
        return x if self.training else x * 0.8


class DropPath(nn.Module):
    def forward(self, x):
        return x * 0.5 if x.shape[0] else x


class OwnFrozenNorm(nn.Module):
    """As DETR has it: the number that keeps the root away from zero is in the forward."""

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
    """Has an activation of the same name as timm's, and uses it first."""

    def __init__(self, channels):
        super().__init__(channels)
        self.act = nn.ReLU()

    def forward(self, x):
        return super().forward(self.act(x))


@pytest.mark.parametrize(
    ("part", "where", "code"),
    [
        (Doubling(), "1.mul", "multiplication"),
        (StochasticDepth(), "1.mul", "multiplication"),
        (DropPath(), "1", "opaque"),
        (OwnFrozenNorm(), "1.mul", "multiplication"),
        (BatchNormAct2d(4), "1", "norm-alone"),
    ],
    ids=lambda given: type(given).__name__ if isinstance(given, nn.Module) else "",
)
def test_a_subclass_or_a_namesake_is_a_barrier_like_any_module_that_we_do_not_know(part, where, code):
    traced = folds_exactly(between(part), image())
    assert traced.network.barriers == (1,)
    assert {each.code for each in traced.network.refusals if each.position == 1} == {code}
    assert codes(traced)[where] == code


def test_a_dropout_that_is_always_on_is_a_barrier_and_stays_on():
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
    """Has nothing of its own but its name."""


class Nothing(nn.Identity):
    pass


@pytest.mark.parametrize("part", [Renamed(0.5), Nothing()], ids=lambda part: type(part).__name__)
def test_a_subclass_with_the_forward_of_its_base_is_seen_through(part):
    assert folds_exactly(between(part), image()).network.barriers == ()


class OwnDropPath(nn.Module):
    """As many models bring their own: nothing in evaluation, at random in training."""

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
def test_a_drop_path_of_ones_own_is_kept_for_training_and_nothing_when_merging(drop):
    model = WithDropPath(drop).train()
    traced = df.trace(model, image())
    assert traced.network.barriers == () and len(traced.network.skips) == 1
    student = df.rewrite(traced, traced.vanilla)
    one, two = (student(image(batch=8)) for _ in range(2))
    assert not torch.equal(one, two)
    folds_exactly(model, image())
    assert not hasattr(next(iter(drop.modules())), "depthfold_passes_its_input")  # the user's own is not touched
