"""A convolution is what it computes: functions with parameters of a module are layers like any other."""

from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import depthfold as df
from depthfold.core import FlaggedSpan
from depthfold.importance.definition import importance_student
from depthfold.testing import random_plan, randomise_statistics
from nets import Net, agree, codes, conv, image


def run(traced, x):
    with torch.no_grad():
        return traced(x)


def folds(model, x, plans=4):
    """Merge by the vanilla plan, which must give the model itself, and by random ones. Returns the network."""
    model = randomise_statistics(model.double()).eval()
    x = x.double()
    traced = df.trace(model, x)
    student = df.rewrite(traced, traced.vanilla)
    assert set(student.state_dict()) == set(model.state_dict())
    agree(run(df.merge(student), x), run(model, x))
    rng = Random(0)
    for _ in range(plans):
        student = df.rewrite(traced, random_plan(traced.network, rng)).eval()
        agree(run(df.merge(student), x), run(student, x))
    return traced


class Functional(nn.Module):
    """Everything by functions, as networks with generated weights are written."""

    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(8, 4, 3, 3))
        self.w2, self.b2 = nn.Parameter(torch.randn(8, 2, 3, 3)), nn.Parameter(torch.randn(8))
        self.gain, self.shift = nn.Parameter(torch.rand(8) + 0.5), nn.Parameter(torch.randn(8))
        self.register_buffer("mean", torch.randn(8))
        self.register_buffer("var", torch.rand(8) + 0.5)
        self.register_buffer("blur", torch.ones(8, 1, 3, 3) / 9)

    def forward(self, x):
        x = F.conv2d(F.pad(x, (1, 0, 2, 1)), self.w1, stride=2)
        x = F.relu6(F.batch_norm(x, self.mean, self.var, self.gain, self.shift, self.training, 0.1, 1e-3))
        y = F.hardswish(F.conv2d(x, self.w2, self.b2, padding="same", groups=4, dilation=2))
        return F.conv2d(x + y, self.blur, None, 1, 1, 1, 8)


def test_functions_with_parameters_of_the_module_are_layers():
    traced = folds(Functional(), image(13))
    assert [layer.where for layer in traced.network.layers] == ["w1", "w2", "blur"]
    assert [layer.norm for layer in traced.network.layers] == ["mean", None, None]
    assert [layer.activation for layer in traced.network.layers] == ["relu6", "hardswish", None]
    assert traced.network.layers[0].shape.padding == ((2, 1), (1, 0))
    assert (traced.network.layers[1].shape.groups, traced.network.layers[1].shape.dilation) == (4, (2, 2))


@pytest.mark.parametrize(("dims", "function"), [(1, F.conv1d), (2, F.conv2d), (3, F.conv3d)])
def test_functions_of_every_number_of_dimensions(dims, function):
    weights = [nn.Parameter(torch.randn(3, 3, *(3,) * dims)) for _ in range(2)]
    model = Net(lambda net, x: function(torch.relu(function(x, net.a, padding=1)), net.b), a=weights[0], b=weights[1])
    assert folds(model, torch.randn(2, 3, *(8, 7, 6)[:dims])).depth == 2


class Ported(nn.Conv2d):
    """A subclass with a forward of its own, as networks from TensorFlow have: it pads, then convolves."""

    def __init__(self, *args, **given):
        super().__init__(*args, **given)
        self.static_padding = nn.ZeroPad2d((0, 1, 0, 1)) if self.stride[0] > 1 else nn.Identity()

    def forward(self, x):
        x = self.static_padding(x)
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Wrapped(nn.Conv2d):
    """A convolution that carries its norm and activation inside, as detectron2 writes it."""

    def __init__(self, *args, norm=None, activation=None, **given):
        super().__init__(*args, **given)
        self.norm, self.activation = norm, activation

    def forward(self, x):
        x = F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)
        if self.norm is not None:
            x = self.norm(x)
        return x if self.activation is None else self.activation(x)


class OwnNorm(nn.BatchNorm2d):
    def forward(self, x):
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )


class OwnReLU(nn.ReLU):
    def forward(self, x):
        return F.relu(x, inplace=self.inplace)


def test_subclasses_are_looked_into():
    model = nn.Sequential(
        Ported(4, 8, 3, stride=2), OwnNorm(8, eps=1e-3), OwnReLU(),
        Wrapped(8, 8, 3, padding=1, norm=nn.BatchNorm2d(8), activation=nn.SiLU()), Ported(8, 4, 1), OwnReLU(True),
    )  # fmt: skip
    traced = folds(model, image(14))
    assert [layer.where for layer in traced.network.layers] == ["0", "3", "4"]
    assert [layer.norm for layer in traced.network.layers] == ["1", "3.norm", None]
    assert [layer.activation for layer in traced.network.layers] == ["relu", "silu", "relu"]
    merged = df.merge(df.rewrite(traced, traced.vanilla))
    # The merged network has plain layers, under the names that the user's convolutions had.
    assert set(merged.state_dict()) == {f"{n}.{name}" for n in (0, 3, 4) for name in ("weight", "bias")}
    assert all(type(module).__module__.startswith("torch.") for module in merged.modules())


def shared():
    weight = nn.Parameter(torch.randn(4, 4, 3, 3))
    return Net(
        lambda net, x: F.conv2d(F.relu(F.conv2d(net.a(x), net.w, padding=1)), net.w, padding=1) + net.w.mean(),
        a=conv(), w=weight,
    )  # fmt: skip


def test_a_parameter_that_several_calls_share():
    traced = folds(shared(), image())
    assert [layer.where for layer in traced.network.layers] == ["a", "w", "w"]
    student = df.rewrite(traced, df.Plan((), (2,)))
    student(image().double()).sum().backward()
    assert student.w.grad is not None
    merged = df.merge(student)
    agree(run(merged, image().double()), run(student.eval(), image().double()))
    assert torch.equal(merged.w, student.w)  # its mean is still read


def test_only_the_layer_of_the_block_is_reinitialised():
    traced = df.trace(shared(), image())
    student = importance_student(traced, FlaggedSpan(1, 2, False, True), seed=0)
    own, other = student.get_submodule("depthfold_conv2d").weight, student.w
    assert own.shape == other.shape
    assert not torch.equal(own, other)
    assert torch.equal(other, traced.graph.w)


class Mode(nn.Module):
    def __init__(self, training):
        super().__init__()
        self.c, self.how = conv(), training
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x):
        training = self.training if self.how == "follows" else False
        return F.batch_norm(self.c(x), self.mean, self.var, None, None, training)


@pytest.mark.parametrize("how", ["follows", "frozen"])
def test_a_functional_batch_norm_follows_the_mode_if_the_forward_says_so(how):
    model = nn.Sequential(Mode(how), nn.ReLU(), conv()).train()
    traced = df.trace(model, image())
    student = df.rewrite(traced, traced.vanilla)
    assert student.training
    student(image() + 3)
    moved = not torch.equal(student.get_buffer("0.mean"), torch.zeros(4))
    assert moved == (how == "follows")
    student.eval()
    agree(run(df.merge(student), image()), run(student, image()), 1e-5)


def test_weights_that_the_forward_computes_are_refused():
    def run_(net, x):
        return net.b(F.conv2d(torch.relu(net.a(x)), F.normalize(net.w)))

    traced = folds(Net(run_, a=conv(), b=conv(), w=nn.Parameter(torch.randn(4, 4, 1, 1))), image())
    assert traced.depth == 2
    assert codes(traced)["conv2d"] == "computed-weights"


def test_ignored_functions_keep_their_convolutions_and_lose_their_norms():
    model = nn.Sequential(Ported(4, 4, 3, padding=1), OwnNorm(4), nn.ReLU(), conv(), nn.ReLU(), conv())
    model = randomise_statistics(model.double()).eval()
    traced = df.trace(model, image().double(), ignore=["0", "1"])
    assert traced.depth == 2
    merged = df.merge(df.rewrite(traced, traced.vanilla))
    agree(run(merged, image().double()), run(model, image().double()))
    assert not any(isinstance(module, nn.BatchNorm2d) for module in merged.modules())
    assert not any(node.target is F.batch_norm for node in merged.graph.nodes)


def test_a_gate_of_functional_convolutions_is_a_gate():
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up = Ported(4, 2, 1), Ported(2, 4, 1)

        def forward(self, x):
            return x * torch.sigmoid(self.up(F.silu(self.down(F.adaptive_avg_pool2d(x, 1)))))

    traced = folds(nn.Sequential(conv(), Gate(), conv()), image())
    assert [layer.where for layer in traced.network.layers] == ["0", "2"]
    assert codes(traced)["1.down"] == "squeeze-excite"
