"""The kernel of a convolution in float64, and its composition with other kernels and batch norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from depthfold.algebra.compose import compose_weights, regroup, spread
from depthfold.core import ConvShape
from depthfold.errors import InvalidValue


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """weight[out, in / groups, *kernel] and bias[out] in float64, with their shape."""

    shape: ConvShape
    weight: Tensor
    bias: Tensor

    def __post_init__(self) -> None:
        shape = self.shape
        expected = (shape.out_channels, shape.in_channels // shape.groups, *shape.kernel)
        if tuple(self.weight.shape) != expected or tuple(self.bias.shape) != expected[:1]:
            raise InvalidValue(
                f"{shape} needs a weight of shape {expected} and a bias of shape {expected[:1]}, "
                f"found {tuple(self.weight.shape)} and {tuple(self.bias.shape)}."
            )
        if not self.weight.dtype == self.bias.dtype == torch.float64:
            raise InvalidValue(f"Kernels are composed in float64, found {self.weight.dtype} and {self.bias.dtype}.")

    @classmethod
    def of(cls, shape: ConvShape, weight: Tensor, bias: Tensor | None) -> Kernel:
        """Return a copy of the kernel of a convolution in float64, on the CPU if the device does not support
        float64."""
        device = weight.device if weight.device.type != "mps" else torch.device("cpu")

        def copied(tensor: Tensor) -> Tensor:
            return tensor.detach().to(device, torch.float64, copy=True)

        return cls(shape, copied(weight), copied(weight.new_zeros(shape.out_channels) if bias is None else bias))

    @classmethod
    def identity(cls, channels: int, dims: int, like: Tensor) -> Kernel:
        """Return the kernel of an identity skip: one tap of 1 per channel."""
        return cls.constant(ConvShape.identity(channels, dims), 1.0, like)

    @classmethod
    def constant(cls, shape: ConvShape, value: float, like: Tensor) -> Kernel:
        """Return the kernel whose taps all have the same value: an average pool, or the identity."""
        taps = (shape.out_channels, shape.in_channels // shape.groups, *shape.kernel)
        return cls(shape, like.new_full(taps, value), like.new_zeros(shape.out_channels))

    def then(self, after: Kernel) -> Kernel:
        """Return this convolution followed by `after` as one.

        The bias of this one reaches every output through all taps of `after`. This is also exact at the borders, but
        only because all padding is moved to the front: no zero padding lies between the bias and `after`.
        """
        weight = compose_weights(self.weight, self.shape, after.weight, after.shape)
        groups = after.shape.groups
        reach = after.weight.flatten(2).sum(2)  # the effect of a constant input channel on each output
        pushed = torch.einsum(
            "goc,gc->go", reach.reshape(groups, -1, reach.shape[1]), self.bias.reshape(groups, -1)
        ).reshape(-1)
        return Kernel(self.shape.then(after.shape), weight, pushed + after.bias)

    def plus(self, skip: Kernel, *, reuse: bool = False) -> Kernel:
        """Return the sum of this convolution and `skip`, which have the same input, as one kernel.

        With `reuse`, the result may use the memory of this kernel, which must not be read afterwards.
        """
        offset = self.shape.offset(skip.shape)
        shape = self.shape.plus(skip.shape)
        assert offset is not None  # plus() raises if there is no offset
        weight = spread(regroup(self.weight, self.shape.groups, shape.groups), self.shape.dilation, shape.dilation)
        added = spread(regroup(skip.weight, skip.shape.groups, shape.groups), skip.shape.dilation, shape.dilation)
        shifted = zip(offset, shape.dilation, added.shape[2:], strict=True)
        window: Any = (..., *(slice(o // grid, o // grid + size) for o, grid, size in shifted))
        weight = weight if reuse else weight.clone()
        weight[window] += added
        return Kernel(shape, weight, self.bias + skip.bias)


@dataclass(frozen=True, slots=True, eq=False)
class NormStatistics:
    """The statistics and affine parameters of a batch norm."""

    mean: Tensor
    variance: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float


def fold_norm(kernel: Kernel, norm: NormStatistics) -> Kernel:
    """Return a convolution followed by a batch norm in evaluation mode as one convolution."""

    def double(tensor: Tensor) -> Tensor:
        return tensor.detach().to(kernel.weight.device, torch.float64)

    factor = torch.rsqrt(double(norm.variance) + norm.eps)
    if norm.weight is not None:
        factor = factor * double(norm.weight)
    bias = (kernel.bias - double(norm.mean)) * factor
    if norm.bias is not None:
        bias = bias + double(norm.bias)
    return Kernel(kernel.shape, kernel.weight * factor.reshape(-1, *[1] * (kernel.weight.dim() - 1)), bias)
