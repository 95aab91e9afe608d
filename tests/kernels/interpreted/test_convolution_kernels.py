"""Convolutions that take over the batch norm and the clamp before them."""

from math import inf

import pytest
import torch
import torch.nn.functional as F

from depthfold.kernels import tiles
from depthfold.kernels.convolution import Depthwise, _weight_gradient, convolve, pointwise
from depthfold.kernels.norm import fold, norm_act
from kernel_cases import close, exact, random_map, random_norm, same_norms, tensors


def run_unit(x, weight, cap, depthwise):
    """Compare norm, clamp, convolution and the norm after it with float64, in both directions."""
    norms = [random_norm(x.shape[1]), random_norm(len(weight))]
    x64, weight64, *norms64 = exact(x, weight, *norms)
    y, sums = convolve(x, None, tensors(norms[0]), cap, weight, depthwise, norms[1].running_mean)
    z = norm_act(y, sums, tensors(norms[1]), None)
    z64 = norms64[0](x64)
    z64 = z64 if cap is None else z64.clamp(0, cap)
    if depthwise is None:
        z64 = F.conv2d(z64, weight64)
    else:
        (top, left), (bottom, right) = depthwise.before, depthwise.after
        z64 = F.conv2d(F.pad(z64, (left, right, top, bottom)), weight64, None, depthwise.stride, groups=len(weight))
    z64 = norms64[1](z64)
    gradient = torch.randn_like(z)
    z.backward(gradient)
    z64.backward(gradient.double())
    close(z, z64)
    close(x.grad, x64.grad)
    close(weight.grad, weight64.grad)
    same_norms(norms, norms64)


# The padding that df.rewrite moves to the front of a segment may be larger than 1, or 0.
@pytest.mark.parametrize(
    ("stride", "padding", "cap", "size"),
    [
        (1, (1, 1), 1.5, (3, 4)),
        (1, (0, 0), None, (3, 5)),
        (1, (3, 2), inf, (2, 3)),
        (2, (1, 1), 1.5, (3, 5)),
        (2, (0, 2), None, (4, 3)),
        (2, (3, 0), inf, (2, 4)),
    ],
)
def test_depthwise_unit_equals_pytorch(stride, padding, cap, size):
    torch.manual_seed(0)
    x, weight = random_map(3, 8, *size), torch.randn(8, 1, 3, 3, requires_grad=True)
    run_unit(x, weight, cap, Depthwise(stride, padding, padding))


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "cap", "size"),
    [
        (5, 1, (2, 2), 1.5, (3, 4)),
        (5, 1, (0, 1), None, (6, 5)),
        (5, 1, (5, 3), inf, (2, 3)),
        (5, 2, (2, 2), 1.5, (5, 6)),
        (5, 2, (1, 0), None, (4, 7)),
        (5, 2, (0, 3), inf, (6, 3)),
        (5, 2, (5, 1), 1.5, (2, 5)),
        (7, 1, (3, 2), 1.5, (4, 5)),
        (7, 2, (3, 4), None, (5, 4)),
    ],
)
def test_depthwise_unit_of_a_larger_size_equals_pytorch(kernel, stride, padding, cap, size):
    torch.manual_seed(0)
    x, weight = random_map(3, 8, *size), torch.randn(8, 1, kernel, kernel, requires_grad=True)
    run_unit(x, weight, cap, Depthwise(stride, padding, padding))


# Networks from TensorFlow pad a row and a column more after the map than before it.
@pytest.mark.parametrize(
    ("kernel", "stride", "before", "after", "cap", "size"),
    [
        (3, 2, (0, 0), (1, 1), 1.5, (4, 6)),
        (3, 1, (0, 1), (2, 0), inf, (3, 4)),
        (5, 2, (1, 1), (2, 2), 1.5, (4, 6)),
        (5, 1, (3, 0), (0, 4), None, (5, 4)),
    ],
)
def test_depthwise_unit_with_different_padding_on_both_sides_equals_pytorch(kernel, stride, before, after, cap, size):
    torch.manual_seed(0)
    x, weight = random_map(3, 8, *size), torch.randn(8, 1, kernel, kernel, requires_grad=True)
    # An image must not see what the one before it leaves.
    assert tiles.depthwise_grid(tiles.DEPTHWISE_FORWARD[0], size[1], 8, 3).images > 1
    run_unit(x, weight, cap, Depthwise(stride, before, after))


@pytest.mark.parametrize("stride", [1, 2])
def test_depthwise_unit_equals_pytorch_with_other_tiles(stride, monkeypatch):
    torch.manual_seed(0)
    tile = tiles.DepthwiseTile(strip=4, strips=1, elements=16, warps=1, launched=100)
    monkeypatch.setattr(tiles, "DEPTHWISE_FORWARD", (tile, tile))
    monkeypatch.setattr(tiles, "DEPTHWISE_BACKWARD", (tile, tile))
    x, weight = random_map(1, 24, 2, 5), torch.randn(24, 1, 3, 3, requires_grad=True)
    run_unit(x, weight, 1.5, Depthwise(stride, (1, 1), (1, 1)))


@pytest.mark.parametrize(("inputs", "outputs", "cap"), [(24, 8, 1.5), (8, 40, inf), (40, 24, None)])
def test_pointwise_unit_equals_pytorch(inputs, outputs, cap):
    torch.manual_seed(0)
    x, weight = random_map(3, inputs, 3, 5), torch.randn(outputs, inputs, 1, 1, requires_grad=True)
    run_unit(x, weight, cap, None)


@pytest.mark.parametrize("stride", [1, 2])
def test_depthwise_convolution_without_norm_equals_pytorch(stride):
    torch.manual_seed(0)
    x, weight = random_map(2, 8, 3, 4), torch.randn(8, 1, 3, 3, requires_grad=True)
    x64, weight64 = exact(x, weight)
    y, sums = convolve(x, None, None, None, weight, Depthwise(stride, (1, 1), (1, 1)), None)
    assert sums is None
    y64 = F.conv2d(x64, weight64, None, stride, 1, groups=8)
    gradient = torch.randn_like(y)
    y.backward(gradient)
    y64.backward(gradient.double())
    close(y, y64)
    close(x.grad, x64.grad)
    close(weight.grad, weight64.grad)


@pytest.mark.parametrize("depthwise", [Depthwise(2, (1, 1), (1, 1)), None])
def test_unit_in_evaluation_mode_equals_pytorch(depthwise):
    torch.manual_seed(0)
    x, norm = random_map(2, 16, 3, 5).detach(), random_norm(16).eval()
    weight = torch.randn(16, 1, 3, 3) if depthwise else torch.randn(8, 16, 1, 1)
    x64, weight64, norm64 = exact(x, weight, norm)
    y, sums = convolve(x, None, fold(tensors(norm)), 1.5, weight, depthwise, None)
    options = dict(stride=2, padding=1, groups=16) if depthwise else {}
    assert sums is None
    close(y, F.conv2d(norm64(x64).clamp(0, 1.5), weight64, **options))


@pytest.mark.parametrize("padding", [(0, 0), (2, 1)])
def test_pointwise_convolution_by_a_matrix_product_equals_pytorch(padding):
    torch.manual_seed(0)
    x, weight, bias = random_map(2, 8, 3, 5), torch.randn(16, 8, 1, 1), torch.randn(16)
    y = pointwise(x, weight, bias, padding)
    assert y.is_contiguous(memory_format=torch.channels_last)
    close(y, F.conv2d(x.double(), weight.double(), bias.double(), padding=padding))


def test_weight_gradient_is_the_sum_over_many_programs():
    torch.manual_seed(0)
    sums = torch.randn(130, 16, 8)
    close(_weight_gradient(sums, torch.empty(16, 8, 1, 1)), sums.double().sum(0)[:, :, None, None])
    sums = torch.randn(130, 9, 8)
    close(_weight_gradient(sums, torch.empty(8, 1, 3, 3), taps=9), sums.double().sum(0).t().reshape(8, 1, 3, 3))
