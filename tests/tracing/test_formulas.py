"""Activations that a forward writes as a formula are those of PyTorch with the same values."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import depthfold as df
from nets import Net, codes, conv, folds_exactly, image


def in_place(net, x):
    x *= torch.sigmoid(x)
    return x


FORMULAS = {
    "silu": lambda net, x: x * torch.sigmoid(x),
    "silu, module": lambda net, x: net.sigmoid(x).mul(x),
    "silu, exponential": lambda net, x: x / (1 + torch.exp(-x)),
    "silu, augmented": in_place,
    "silu, in place": lambda net, x: x.mul_(x.sigmoid()),
    "hardswish": lambda net, x: x * F.relu6(x + 3) / 6,
    "hardswish, gate first": lambda net, x: x * (net.relu6(x + 3) / 6),
    "hardswish, clamped": lambda net, x: x * (x + 3).clamp(0, 6) * (1 / 6),
    "hardsigmoid": lambda net, x: F.relu6(x + 3, inplace=True) / 6,
    "mish": lambda net, x: x * torch.tanh(F.softplus(x)),
    "mish, logarithm": lambda net, x: x * torch.log(1 + torch.exp(x)).tanh(),
    "gelu": lambda net, x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "relu": lambda net, x: x.clamp(min=0),
    "relu, in place": lambda net, x: x.clamp_(min=0),
    "relu, absolute": lambda net, x: (x + x.abs()) / 2,
    "relu6": lambda net, x: torch.clamp(x, 0, 6),
    "elu": lambda net, x: torch.maximum(x, torch.exp(torch.minimum(x, 0 * x)) - 1),
}

UNKNOWN = {
    "another function": lambda net, x: x * x.tanh(),
    "another scale": lambda net, x: x * torch.sigmoid(1.702 * x),
    "trained": lambda net, x: x * torch.sigmoid(net.beta * x),
    "two values": lambda net, x: x * torch.sigmoid(net.gate(x)),
    "linear": lambda net, x: (x + x) / 2,
    "read elsewhere": lambda net, x: x * (gate := x.sigmoid()) + 1 - gate,
    "not by element": lambda net, x: x * torch.sigmoid(x.mean((2, 3), keepdim=True)),
    "hooked": lambda net, x: x * net.hooked(x),
}


def between(formula, first=None):
    hooked = nn.Sigmoid()
    hooked.register_forward_hook(lambda module, inputs, output: output)
    parts = {"sigmoid": nn.Sigmoid(), "relu6": nn.ReLU6(inplace=True), "gate": conv(kernel=1), "hooked": hooked}
    act = Net(formula, beta=nn.Parameter(torch.ones(1)), **parts)
    return Net(lambda net, x: net.b(net.act(net.a(x))), a=first or conv(), act=act, b=conv())


@pytest.mark.parametrize("name", FORMULAS)
def test_formula_is_the_activation_of_a_layer(name):
    traced = folds_exactly(between(FORMULAS[name]), image())
    kind, _, _ = name.partition(",")
    assert [layer.activation for layer in traced.network.layers] == [kind, None]
    assert (0, 2) in {(span.i, span.j) for span in traced.network.spans()}


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_formula_is_a_barrier(name):
    traced = folds_exactly(between(UNKNOWN[name]), image())
    assert traced.network.layers[0].activation is None
    assert {where for where in codes(traced) if where.startswith("act")}


def test_single_precision_network_keeps_its_values():
    model = between(FORMULAS["hardswish"]).eval()
    traced = df.trace(model, image())
    with torch.no_grad():
        torch.testing.assert_close(df.rewrite(traced, traced.vanilla)(image()), model(image()))


def test_formula_that_writes_to_the_input_of_the_network_stays():
    model = Net(lambda net, x: net.a(x.clamp_(min=0)), a=conv())
    traced = df.trace(model, image())
    x = image()
    df.rewrite(traced, traced.vanilla)(x)
    assert x.min() == 0


def test_formula_of_integers_stays():
    model = Net(lambda net, x: net.a(x * torch.sigmoid(x)), a=conv())
    x = torch.randint(0, 9, (2, 4, 12, 13))
    traced = df.trace(model, x)
    with torch.no_grad():
        torch.testing.assert_close(df.rewrite(traced, traced.vanilla)(x), model(x))


def test_formula_of_an_activation_is_replaced_alone():
    traced = folds_exactly(between(lambda net, x: (y := F.relu(x)) * torch.sigmoid(y)), image())
    assert [node.target for node in traced.graph.graph.nodes if node.op == "call_function"] == [F.relu, F.silu]
    assert codes(traced)["act.silu"] == "second-activation"
