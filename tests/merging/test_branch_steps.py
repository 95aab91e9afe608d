"""Branches of several steps: average pools, batch norms and convolutions."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import depthfold as df
from depthfold.core import ConvShape
from depthfold.errors import VerificationError
from depthfold.tracing.shapes import AveragePool
from nets import Net, codes, conv, folds_exactly, image, refusal
from parallel import Between, conv_bn, is_one_layer, merged

POOLS = {
    "module": lambda: nn.AvgPool2d(3, stride=1, padding=1),
    "divisor": lambda: nn.AvgPool2d(3, stride=1, padding=1, divisor_override=5),
    "divisor, padding not counted": lambda: nn.AvgPool2d(
        3, stride=1, padding=1, divisor_override=7, count_include_pad=False
    ),
    "rounding up without a stride": lambda: nn.AvgPool2d(3, stride=1, padding=1, ceil_mode=True),
    "flat": lambda: nn.AvgPool2d((1, 3), stride=(1, 1), padding=(0, 1)),
    "function": lambda: Net(lambda net, x: F.avg_pool2d(x, 3, 1, 1)),
    "function with names": lambda: Net(lambda net, x: F.avg_pool2d(x, kernel_size=[3, 1], stride=1, padding=(1, 0))),
    "with a norm": lambda: nn.Sequential(nn.AvgPool2d(3, 1, 1), nn.BatchNorm2d(4)),
    "before a convolution": lambda: nn.Sequential(nn.AvgPool2d(3, 1, 1), conv_bn(kernel=1, bias=True)),
    "between norms": lambda: nn.Sequential(nn.BatchNorm2d(4), nn.AvgPool2d(1), nn.BatchNorm2d(4)),
}


@pytest.mark.parametrize("name", POOLS)
def test_average_pools_are_branches(name):
    pool = POOLS[name]()
    block = Net(
        lambda net, x: net.large(x) + (net.pool(x) + net.point(x)), large=conv_bn(), pool=pool, point=conv(4, 4, 1)
    )
    traced = is_one_layer(block, terms=3)
    assert not any(isinstance(part, nn.AvgPool2d) for part in merged(traced).modules())


@pytest.mark.parametrize("dims", [1, 3])
def test_average_pools_in_other_dimensions(dims):
    convolution = {1: nn.Conv1d, 3: nn.Conv3d}[dims]
    pool = {1: nn.AvgPool1d, 3: nn.AvgPool3d}[dims]
    model = Net(
        lambda net, x: net.b(torch.relu(net.a(x) + net.pool(x))),
        a=convolution(4, 4, 3, padding=1),
        b=convolution(4, 4, 3, padding=1),
        pool=pool(3, 1, 1),
    )
    x = torch.randn(2, 4, *(9, 8, 7)[:dims])
    traced = folds_exactly(model, x)
    assert (traced.depth, len(traced.network.skips), traced.network.barriers) == (2, 1, ())


def test_pool_that_is_called_twice_keeps_its_padding_elsewhere():
    def run(net, x):
        h = net.a(x).relu()
        return net.pool(net.c((net.b(h) + net.pool(h)).relu()))

    model = Net(run, a=conv(), b=conv(), c=conv(), pool=nn.AvgPool2d(3, 1, 1))
    traced = folds_exactly(model, image(9))
    assert (traced.depth, len(traced.network.skips)) == (3, 1)
    assert df.rewrite(traced, df.Plan((), ()))(image(9).double()).shape == image(9).shape


def test_strided_pool_with_a_convolution_is_a_shortcut():
    block = Net(
        lambda net, x: net.b(torch.relu(net.a(x))) + net.shortcut(x),
        a=conv_bn(stride=2),
        b=conv_bn(4, 6),
        shortcut=nn.Sequential(nn.AvgPool2d(2, 2), conv_bn(4, 6, 1)),
    )
    traced = folds_exactly(Between(block, outs=6), image(14)[..., :14], plans=8)
    assert (traced.depth, traced.network.barriers) == (5, ())
    (skip,) = traced.network.skips
    assert (skip.source, skip.target) == (1, 3)
    shape = ConvShape(
        in_channels=4, out_channels=6, kernel=(2, 2), stride=(2, 2), padding=((0, 0),) * 2, dilation=(1, 1)
    )
    assert skip.projection == shape


INEXACT = {
    "rounding up": (nn.AvgPool2d(2, 2, ceil_mode=True), "it rounds the output size up"),
    "padding not counted": (
        nn.AvgPool2d(3, 2, 1, count_include_pad=False),
        "it divides by a different number at the borders",
    ),
}


@pytest.mark.parametrize("name", INEXACT)
def test_pool_that_is_not_a_convolution_is_refused(name):
    pool, why = INEXACT[name]
    block = Net(lambda net, x: net.large(x) + net.pool(x), large=conv(stride=2), pool=pool)
    traced = folds_exactly(Between(block), image(15) if name != "rounding up" else image(14)[..., :14])
    assert not traced.network.skips
    assert codes(traced)["block.pool"] == "pooling"
    assert why in refusal(traced, "block.pool").why


@pytest.mark.parametrize("name", INEXACT)
def test_verification_detects_such_a_pool_if_it_is_not_refused(name, monkeypatch):
    monkeypatch.setattr(AveragePool, "deviation", None)
    pool, _ = INEXACT[name]
    block = Net(lambda net, x: net.large(x) + net.pool(x), large=conv(stride=2), pool=pool)
    x = (image(13)[..., :13] if name == "rounding up" else image(15)).double()
    traced = df.trace(Between(block).double(), x)
    assert traced.network.skips
    with pytest.raises(VerificationError):
        merged(traced)


def test_pool_larger_than_the_parallel_convolution_stays():
    block = Net(lambda net, x: net.point(x) + net.pool(x), point=conv(kernel=1), pool=nn.AvgPool2d(3, 1, 1))
    assert not folds_exactly(Between(block), image(9)).network.skips


def test_pool_in_the_middle_of_a_chain_is_a_barrier():
    model = Net(lambda net, x: net.b(net.pool(net.a(x))), a=conv(), pool=nn.AvgPool2d(3, 1, 1), b=conv())
    traced = folds_exactly(model, image(9))
    assert (traced.network.barriers, codes(traced)["pool"]) == ((1,), "pooling")


@pytest.mark.parametrize("counted", [True, False])
def test_ignored_pool_is_not_a_branch(counted):
    pool = nn.AvgPool2d(3, 1, 1, count_include_pad=counted)
    block = Net(lambda net, x: net.large(x) + net.pool(x), large=conv(), pool=pool)
    traced = folds_exactly(Between(block), image(9), ignore=["block.pool"])
    assert not traced.network.skips
    assert codes(traced)["block.pool"] == "ignored"


ROWS = {
    "1x1, then 3x3": (lambda: nn.Sequential(conv_bn(4, 6, 1, padding=1), conv_bn(6, 4, 3, padding=0)), True),
    "3x3, then 1x1": (lambda: nn.Sequential(conv_bn(4, 6, 3), conv_bn(6, 4, 1)), True),
    "1x1, then a pool": (lambda: nn.Sequential(conv_bn(4, 4, 1, padding=1), nn.AvgPool2d(3, 1)), True),
    "padding in the middle": (lambda: nn.Sequential(conv_bn(4, 6, 1), conv_bn(6, 4, 3)), False),
    "padding of a pool in the middle": (lambda: nn.Sequential(conv_bn(4, 4, 1), nn.AvgPool2d(3, 1, 1)), False),
}


@pytest.mark.parametrize("name", ROWS)
def test_branches_of_two_steps(name):
    build, exact = ROWS[name]
    block = Net(lambda net, x: net.large(x) + net.row(x), large=conv_bn(), row=build())
    if exact:
        is_one_layer(block, terms=2)
    else:
        traced = folds_exactly(Between(block), image(13))
        assert all(skip.target > skip.source + 1 for skip in traced.network.skips)


def test_1x1_convolution_parallel_to_two_layers_is_a_projection():
    model = Net(lambda net, x: net.b(net.a(x)) + net.c(x), a=conv(kernel=1), b=conv(kernel=1), c=conv_bn(kernel=1))
    traced = folds_exactly(model, image(9))
    assert [(skip.source, skip.target) for skip in traced.network.skips] == [(0, 2)]
