"""Layers with random weights, for timing: whose random numbers they draw, and which."""

import torch
from torch import nn

import depthfold as df
from depthfold.core import ConvShape, Plan
from depthfold.merging import sketch
from depthfold.merging.kernels import random_module
from depthfold.rewriting import rewrite

SHAPE = ConvShape(
    in_channels=4,
    out_channels=6,
    kernel=(3, 5),
    stride=(2, 1),
    padding=((1, 1), (2, 2)),
    dilation=(1, 1),
    groups=2,
)


def test_a_random_layer_is_one_of_pytorchs_with_weights_as_pytorch_draws_them():
    layer = random_module(SHAPE, device=torch.device("cpu"), dtype=torch.float64)
    like = nn.Conv2d(4, 6, (3, 5), (2, 1), (1, 2), groups=2, dtype=torch.float64)
    assert repr(layer) == repr(like)
    bound = (2 * 3 * 5) ** -0.5  # one by the root of how many numbers each output is a sum of
    for found, expected in zip(layer.parameters(), like.parameters(), strict=True):
        assert (found.shape, found.dtype, found.requires_grad) == (expected.shape, torch.float64, True)
        assert found.abs().max() <= bound
        assert len(found.unique()) == found.numel()
    assert 0.85 < layer.weight.std() / (bound / 3**0.5) < 1.15  # the spread of a uniform distribution
    assert torch.equal(random_module(SHAPE, dtype=torch.float64).weight, layer.weight)


def test_a_layer_of_a_network_that_is_only_shapes():
    assert random_module(SHAPE, device=torch.device("meta")).weight.is_meta


def test_random_weights_leave_the_users_random_numbers_alone():
    traced = df.trace(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)), torch.randn(1, 3, 16, 16))
    student = rewrite(traced, Plan(activations=(), cuts=()))
    for draw in (lambda: random_module(SHAPE), lambda: sketch(student)):
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        draw()
        assert torch.equal(torch.rand(3), expected)
