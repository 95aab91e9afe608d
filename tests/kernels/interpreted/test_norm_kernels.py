"""Batch norm with an addition and a clamp, and with a max pool."""

from math import inf

import pytest
import torch
from torch import nn

from depthfold.kernels.norm import fold, norm_act
from depthfold.kernels.pooling import norm_act_pool
from kernel_cases import close, exact, random_map, random_norm, same_norms, tensors


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("cap", [None, inf, 1.5])
def test_norm_addition_and_clamp_equal_pytorch(cap, added):
    torch.manual_seed(0)
    y, residual, norm = random_map(3, 24, 5, 7), random_map(3, 24, 5, 7), random_norm(24)
    y64, residual64, norm64 = exact(y, residual, norm)
    z = norm_act(y, None, tensors(norm), cap, residual if added else None)
    z64 = norm64(y64) + residual64 if added else norm64(y64)
    z64 = z64 if cap is None else z64.clamp(0, cap)
    gradient = torch.randn_like(z)
    z.backward(gradient)
    z64.backward(gradient.double())
    close(z, z64)
    close(y.grad, y64.grad)
    same_norms([norm], [norm64])
    if added:
        close(residual.grad, residual64.grad)


def test_running_mean_includes_the_bias_that_the_convolution_left_out():
    torch.manual_seed(0)
    y, norm, offset = random_map(2, 8, 3, 5), random_norm(8), torch.randn(8, requires_grad=True)
    y64, norm64, offset64 = exact(y, norm, offset)
    z = norm_act(y, None, tensors(norm, offset), 6.0)
    z64 = norm64(y64 + offset64[:, None, None]).clamp(0, 6)
    close(z, z64)
    gradient = torch.randn_like(z)
    z.backward(gradient)
    z64.backward(gradient.double())
    same_norms([norm], [norm64])
    assert torch.equal(offset.grad, torch.zeros(8))


def test_residual_that_is_broadcast_is_added():
    torch.manual_seed(0)
    y, residual, norm = random_map(2, 8, 3, 5), torch.randn(8, 1, 1, requires_grad=True), random_norm(8)
    y64, residual64, norm64 = exact(y, residual, norm)
    z, z64 = norm_act(y, None, tensors(norm), 6.0, residual), (norm64(y64) + residual64).clamp(0, 6)
    close(z, z64)
    z.sum().backward()
    z64.sum().backward()
    close(residual.grad, residual64.grad)


def test_contiguous_map_and_gradient_are_accepted():
    torch.manual_seed(0)
    y, norm = torch.randn(2, 8, 3, 5, requires_grad=True), random_norm(8)
    y64, norm64 = exact(y, norm)
    z, z64 = norm_act(y, None, tensors(norm), 6.0), norm64(y64).clamp(0, 6)
    gradient = torch.randn(2, 8, 3, 5)
    z.backward(gradient)
    z64.backward(gradient.double())
    close(z, z64)
    close(y.grad, y64.grad)


@pytest.mark.parametrize("size", [(4, 6), (5, 6)])
@pytest.mark.parametrize("cap", [None, inf, 1.5])
def test_norm_clamp_and_pool_equal_pytorch(cap, size):
    torch.manual_seed(0)
    y, norm = random_map(3, 24, *size), random_norm(24)
    y64, norm64 = exact(y, norm)
    z, z64 = norm_act_pool(y, None, tensors(norm), cap), norm64(y64)
    z64 = nn.functional.max_pool2d(z64 if cap is None else z64.clamp(0, cap), 2)
    gradient = torch.randn_like(z)
    z.backward(gradient)
    z64.backward(gradient.double())
    close(z, z64)
    close(y.grad, y64.grad)
    same_norms([norm], [norm64])


def test_first_of_equal_values_takes_the_gradient_of_a_max_pool():
    torch.manual_seed(0)
    y = torch.randint(-1, 2, (2, 8, 4, 4)).float().requires_grad_()  # most windows have their maximum twice
    norm = random_norm(8)
    y64, norm64 = exact(y, norm)
    gradient = torch.randn(2, 8, 2, 2)
    norm_act_pool(y, None, tensors(norm), inf).backward(gradient)
    nn.functional.max_pool2d(norm64(y64).relu(), 2).backward(gradient.double())
    close(y.grad, y64.grad)
    same_norms([norm], [norm64])


@pytest.mark.parametrize("pool", [False, True])
def test_folded_norm_equals_evaluation_mode(pool):
    torch.manual_seed(0)
    y, norm, offset = random_map(2, 8, 4, 6).detach(), random_norm(8).eval(), torch.randn(8)
    z64 = norm.double()((y + offset[:, None, None]).double()).clamp(0, 6)
    folded = fold(tensors(norm.float(), offset))
    if pool:
        close(norm_act_pool(y, None, folded, 6.0), nn.functional.max_pool2d(z64, 2))
    else:
        close(norm_act(y, None, folded, 6.0), z64)
