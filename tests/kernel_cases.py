"""Random tensors and batch norms for the kernels, and the comparison with float64."""

import copy

import torch
from torch import nn

from depthfold.kernels.norm import Norm


def random_map(*shape):
    """Return a map in channels_last whose mean is not 0."""
    return (torch.randn(shape) * 2 + 0.5).contiguous(memory_format=torch.channels_last).requires_grad_()


def random_norm(channels):
    """Return a batch norm in training, half of whose weights are negative."""
    norm = nn.BatchNorm2d(channels, momentum=0.2)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    nn.init.uniform_(norm.bias, -0.5, 0.5)
    nn.init.uniform_(norm.running_mean, -0.5, 0.5)
    norm.weight.data[::2] *= -1
    return norm


def tensors(norm, offset=None):
    """Return a batch norm as the kernels take it."""
    return Norm(norm.weight, norm.bias, offset, norm.running_mean, norm.running_var, norm.momentum, norm.eps)


def exact(*objects):
    """Return copies of modules and tensors in float64."""
    return [
        each.detach().double().requires_grad_() if isinstance(each, torch.Tensor) else copy.deepcopy(each).double()
        for each in objects
    ]


def close(found, wanted, tolerance=2e-5):
    """Assert that tensors are equal up to a share of the largest value, or of 1 if that is larger."""
    assert found.shape == wanted.shape
    error = (found.detach().double() - wanted.detach().double()).abs().max().item()
    assert error <= tolerance * max(wanted.detach().abs().max().item(), 1.0), error


def same_norms(norms, references):
    """Assert that batch norms have the same gradients and running statistics."""
    for norm, reference in zip(norms, references, strict=True):
        for found, wanted in zip(norm.parameters(), reference.parameters(), strict=True):
            close(found.grad, wanted.grad)
        close(norm.running_mean, reference.running_mean)
        close(norm.running_var, reference.running_var)
