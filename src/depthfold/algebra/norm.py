"""Batch norm in evaluation: one factor and one summand per channel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from depthfold.algebra.kernel import Kernel


@dataclass(frozen=True, slots=True, eq=False)
class NormStatistics:
    """What a batch norm knows. `eps` is its own: networks use 1e-5, 1e-3 and others."""

    mean: Tensor
    variance: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float


def fold_norm(kernel: Kernel, norm: NormStatistics) -> Kernel:
    """The convolution and then its batch norm, as one convolution."""

    def double(tensor: Tensor) -> Tensor:
        return tensor.detach().to(kernel.weight.device, torch.float64)

    factor = torch.rsqrt(double(norm.variance) + norm.eps)
    if norm.weight is not None:
        factor = factor * double(norm.weight)
    bias = (kernel.bias - double(norm.mean)) * factor
    if norm.bias is not None:
        bias = bias + double(norm.bias)
    return Kernel(kernel.shape, kernel.weight * factor.reshape(-1, *[1] * (kernel.weight.dim() - 1)), bias)
