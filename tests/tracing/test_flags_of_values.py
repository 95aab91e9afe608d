"""Conditions on the type or device of a value are decided for the example inputs."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import depthfold as df
from nets import Net, agree, codes, conv, image

FLAGS = {
    "is_cuda": lambda x: x.is_cuda,
    "dtype": lambda x: x.dtype != torch.float32,
    "one of several": lambda x: x.dtype in (torch.float16, torch.bfloat16),
    "device": lambda x: x.device == torch.device("meta"),
    "device type": lambda x: x.device.type == "cuda",
    "requires_grad": lambda x: x.requires_grad,
    "method": lambda x: not x.is_floating_point(),
    "function": lambda x: torch.is_complex(x),
}


def doubled_if(condition):
    """A network with two convolutions and an activation, which doubles its input if the condition holds."""

    def forward(net, x):
        x = net.a(x)
        return net.b(F.relu(x * 2 if condition(x) else x))

    return Net(forward, a=conv(), b=conv())


@pytest.mark.parametrize("inside", [False, True], ids=["top level", "submodule"])
@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("holds", [False, True])
def test_condition_on_a_flag_is_decided_for_the_example(name, holds, inside):
    part = doubled_if(lambda x: bool(FLAGS[name](x)) is holds)
    model = nn.Sequential(conv(), part) if inside else part
    traced = df.trace(model, image())
    assert traced.depth == 2 + inside
    assert "shape-read" not in codes(traced).values()  # the question itself is not a barrier
    merged = df.merge(df.rewrite(traced, traced.vanilla))
    with torch.no_grad():
        agree(merged(image(seed=1)), model(image(seed=1)), tolerance=1e-5)
    merged.double()(image().double())  # the answer is not asserted


def test_device_of_a_weight():
    def forward(net, x):
        return net.b(F.relu(net.a(x if x.device == net.a.weight.device else x.to(net.a.weight.device))))

    assert df.trace(Net(forward, a=conv(), b=conv()), image()).depth == 2


def test_flag_that_is_not_a_condition_is_not_fixed():
    def forward(net, x):
        return net.a(x).to(x.dtype).double().to(dtype=x.dtype, device=x.device)

    model = Net(forward, a=conv())
    traced = df.trace(model, image())
    merged = df.merge(df.rewrite(traced, traced.vanilla)).double()
    assert merged(image().double()).dtype == torch.float64


@pytest.mark.parametrize("condition", [lambda x: x.sum() > 0, lambda x: (x.dtype == torch.float32) & (x.sum() > 0)])
def test_condition_on_the_data_is_still_not_decided(condition):
    traced = df.trace(nn.Sequential(conv(), doubled_if(condition), conv()), image())
    assert [refusal.code for refusal in traced.network.refusals if refusal.where == "1"] == ["opaque"]
