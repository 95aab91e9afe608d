"""Constant factors after a convolution are part of its layer: they are trained with it, and merged exactly."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import depthfold as df
from depthfold.testing import randomise_statistics
from nets import Net, agree, codes, conv, folds_exactly, image, only, refusal
from parallel import conv_bn, convolutions, is_one_layer, merged

FACTORS = {
    "y * 0.1": (lambda y: y * 0.1, 0.1),
    "2 * y": (lambda y: 2 * y, 2),
    "y.mul(0.1)": (lambda y: y.mul(0.1), 0.1),
    "y.mul_(0.1)": (lambda y: y.mul_(0.1), 0.1),
    "y *= 0.1": (lambda y: operator.imul(y, 0.1), 0.1),
    "torch.mul(0.1, y)": (lambda y: torch.mul(0.1, y), 0.1),
    "y / 4": (lambda y: y / 4, 0.25),
    "y.div(3)": (lambda y: y.div(3), 1 / 3),
    "-y": (lambda y: -y, -1),
    "y.neg()": (lambda y: y.neg(), -1),
    "several": (lambda y: -(y * 0.5) / 4, -0.125),
}


class Scaled(nn.Module):
    """The block of EDSR, between two layers."""

    def __init__(self, scale, norm=False):
        super().__init__()
        self.before, self.a, self.b, self.after = conv(), conv(), conv_bn() if norm else conv(), conv()
        self.scale = scale

    def forward(self, x):
        x = F.relu(self.before(x))
        return self.after(F.relu(self.scale(self.b(F.relu(self.a(x)))) + x))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("factor", FACTORS)
def test_factor_after_a_convolution_is_part_of_its_layer(factor, norm):
    scale, number = FACTORS[factor]
    model = Scaled(scale, norm)
    traced = folds_exactly(model, image(), plans=6)
    assert (traced.depth, traced.network.barriers, len(traced.network.skips)) == (4, (), 1)
    assert traced.network.layers[2].norm == ("b.1" if norm else None)
    student = df.rewrite(traced, only(traced, 1, 3))  # the block as one convolution
    assert student.state_dict().keys() == model.state_dict().keys()
    block = df.merge(student)
    assert convolutions(block) == 3
    assert not any("mul" in str(node.target) for node in block.graph.nodes)
    x = image().double()
    with torch.no_grad():
        y = model.before(x).relu()
        wide = F.conv2d(F.pad(y, (2,) * 4), model.a.weight, model.a.bias)  # its padding is at the front of the block
        second = nn.Sequential(model.b) if not norm else model.b
        end = F.conv2d(wide, second[0].weight, second[0].bias)
        wanted = model.after(F.relu(number * (second[1](end) if norm else end) + y))
        agree(block(x), wanted)


def test_factor_is_trained_with_its_layer():
    """The gradient of the weight is that of the model, factor included."""
    model = Scaled(lambda y: y * 0.1).double()
    traced = df.trace(model, image().double())
    student = df.rewrite(traced, traced.vanilla)
    for each in (model, student):
        each(image().double()).square().sum().backward()
    agree(student.get_parameter("b.weight").grad, model.b.weight.grad)


SUBTRACTIONS = {
    "x - y": lambda x, y: x - y,
    "x.sub(y)": lambda x, y: x.sub(y),
    "torch.sub(x, other=y)": lambda x, y: torch.sub(x, other=y),
    "torch.sub(x, y, alpha=2)": lambda x, y: torch.sub(x, y, alpha=2),
    "torch.add(x, y, alpha=0.3)": lambda x, y: torch.add(x, y, alpha=0.3),
    "x.add(y, alpha=0.3)": lambda x, y: x.add(y, alpha=0.3),
    "x - y / 2": lambda x, y: x - y / 2,
    "x -= y": lambda x, y: operator.isub(x, y),
    "x.sub_(y)": lambda x, y: x.sub_(y),
    "0.5 * x - y": lambda x, y: 0.5 * x - y,
    "x *= 0.5, x - y": lambda x, y: operator.imul(x, 0.5) - y,
}


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("subtraction", SUBTRACTIONS)
def test_subtracted_convolution_ends_a_residual(subtraction, norm):
    """DnCNN computes the noise and subtracts it from the image."""

    def run(net, x):
        x = F.relu(net.before(x))
        return net.after(F.relu(SUBTRACTIONS[subtraction](x, net.b(F.relu(net.a(x))))))

    model = Net(run, before=conv(), a=conv(), b=conv_bn() if norm else conv(), after=conv())
    traced = folds_exactly(model, image(), plans=6)
    assert (traced.depth, traced.network.barriers, len(traced.network.skips)) == (4, (), 1)
    assert convolutions(merged(traced, df.Plan((), ()))) == 1


def test_scaled_branches_are_one_layer():
    """A factor may scale the identity, a batch norm, a pool or a convolution parallel to the layer."""

    def run(net, x):
        x = F.relu(net.before(x))
        sides = 0.5 * x + net.norm(x) * 2 - net.point(x) + net.pool(x) / 3
        return net.after(F.relu(sides + net.large(x)))

    parts = dict(norm=nn.BatchNorm2d(4), point=conv_bn(kernel=1), pool=nn.AvgPool2d(3, 1, 1), large=conv_bn())
    model = Net(run, before=conv(), after=conv(), **parts)
    traced = folds_exactly(model, image(), plans=6)
    assert (traced.depth, traced.network.barriers, len(traced.network.skips)) == (3, (), 4)


def test_subtracted_batch_norm_is_a_branch():
    """The token mixer of FastViT."""
    parts = dict(mixer=conv_bn(), point=conv_bn(kernel=1), norm=nn.BatchNorm2d(4))
    traced = is_one_layer(Net(lambda net, x: net.mixer(x) + net.point(x) - (0 + net.norm(x)), **parts), terms=3)
    assert [layer.norm for layer in traced.network.layers] == [None, "block.mixer.1", None, None]


def test_scaled_projection_outside_its_segment_is_folded():
    def run(net, x):
        x = F.relu(net.before(x))
        return F.relu(net.b(F.relu(net.a(x))) + net.down(x) * 0.5)

    model = Net(run, before=conv(), a=conv(), b=conv(), down=conv_bn(kernel=1))
    traced = folds_exactly(model, image())
    assert len(traced.network.skips) == 1
    shallow = merged(traced)
    assert not any("mul" in str(node.target) for node in shallow.graph.nodes)


def test_batch_norm_after_a_factor_is_part_of_the_layer():
    parts = dict(a=conv(), norm=nn.BatchNorm2d(4), b=conv())
    traced = folds_exactly(Net(lambda net, x: net.b(F.relu(net.norm(net.a(x) * 3) / 2)), **parts), image())
    assert (traced.network.barriers, traced.network.layers[0].norm) == ((), "norm")


def test_dropped_layer_drops_its_factor():
    model = randomise_statistics(Scaled(lambda y: y.mul_(0.1), norm=True)).double().eval()
    x = image().double()
    traced = df.trace(model, x)
    student = df.rewrite(traced, df.Plan({1, 2, 3}, {1, 2, 3}, df.Drops(layers=[3])))
    with torch.no_grad():
        y = model.before(x).relu()
        wanted = model.after(F.relu(model.a(y).relu() + y))
        agree(student(x), wanted)
        agree(df.merge(student)(x), wanted)


def test_scaled_skip_of_a_dropped_layer_does_not_write_to_its_value():
    def run(net, x):
        x = F.relu(net.before(x))
        y = net.b(F.relu(net.a(x)))
        return net.after(F.relu(y + x.mul_(0.5)))

    model, x = Net(run, before=conv(), a=conv(), b=conv(), after=conv()).double(), image().double()
    traced = df.trace(model, x)
    student = df.rewrite(traced, df.Plan({3}, {3}, df.Drops(layers=[2, 3])))
    with torch.no_grad():
        y = model.before(x)
        wanted = model.after(F.relu(y + 0.5 * y))
        agree(student(x), wanted)
        agree(df.merge(student)(x), wanted)


def test_value_that_something_else_reads_is_not_scaled_with_its_layer():
    def run(net, x):
        y = net.a(x)
        return net.b(F.relu(y * 0.5)) + net.c(F.relu(y))

    traced = folds_exactly(Net(run, a=conv(), b=conv(), c=conv()), image())
    assert traced.network.barriers == (1, 2)
    assert "it alone reads" in refusal(traced, "mul").why


@pytest.mark.parametrize(
    "do",
    [
        lambda net, y: F.relu(y) * 0.2,
        lambda net, y: y * float("inf"),
        lambda net, y: y / 0,
        lambda net, y: y * net.gamma,
        lambda net, y: torch.div(y, 2, rounding_mode="floor"),
        lambda net, y: 1 / (y.abs() + 1),
        lambda net, y: net.norm(y) - F.relu(net.other(y)),
        lambda net, y: F.relu(net.other(y)) - y.mean((2, 3), keepdim=True),
        lambda net, y: y - net.narrow(y),
    ],
)
def test_other_factors_and_subtractions_are_barriers(do):
    parts = dict(gamma=nn.Parameter(torch.ones(1)), norm=nn.BatchNorm2d(4), other=conv(), narrow=conv(4, 1))
    model = Net(lambda net, x: net.b(do(net, net.a(x))), a=conv(), b=conv(), **parts).double().eval()
    traced = df.trace(model, image().double())
    last = traced.depth - 1
    assert last in traced.network.barriers
    student = df.rewrite(traced, df.Plan((), ()))
    with torch.no_grad():
        found, wanted = df.rewrite(traced, traced.vanilla)(image().double()), model(image().double())
        assert torch.equal(found, wanted) or wanted.isnan().any()
    assert student is not None


def test_factor_that_overwrites_a_value_under_another_name():
    def run(net, x):
        y = net.a(x)
        part = y[:, :2]
        y.mul_(0.5)
        return net.b(F.relu(torch.cat([part, y], 1)))

    traced = folds_exactly(Net(run, a=conv(), b=conv(6, 4)), image())
    assert codes(traced)["mul_"] == "multiplication"


class Between(nn.Module):
    def forward(self, x, y):
        return x * y if x.sum() > 1e9 else x - 2 * y


def test_module_with_the_name_of_a_method_is_not_a_subtraction():
    traced = folds_exactly(Net(lambda net, x: net.b(net.sub(x, net.a(x))), a=conv(), b=conv(), sub=Between()), image())
    assert codes(traced)["sub"] == "opaque"
