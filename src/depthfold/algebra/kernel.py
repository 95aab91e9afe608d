"""A convolution as data: its shape, weight and bias, in float64, and the two ways of making one of two."""

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
    """weight[out, in / groups, *kernel] and bias[out], as float64, with their shape."""

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
        """The kernel of a convolution layer, in float64 (on the CPU where the device has none). Its memory is its own,
        even where the layer is in float64, too."""
        device = weight.device if weight.device.type != "mps" else torch.device("cpu")

        def own(tensor: Tensor) -> Tensor:
            return tensor.detach().to(device, torch.float64, copy=True)

        return cls(shape, own(weight), own(weight.new_zeros(shape.out_channels) if bias is None else bias))

    @classmethod
    def identity(cls, channels: int, dims: int, like: Tensor) -> Kernel:
        """A skip as a kernel: one tap of 1 per channel (Dirac)."""
        return cls.constant(ConvShape.identity(channels, dims), 1.0, like)

    @classmethod
    def constant(cls, shape: ConvShape, value: float, like: Tensor) -> Kernel:
        """The kernel whose taps all have one value: an average pool, or the identity."""
        taps = (shape.out_channels, shape.in_channels // shape.groups, *shape.kernel)
        return cls(shape, like.new_full(taps, value), like.new_zeros(shape.out_channels))

    def then(self, after: Kernel) -> Kernel:
        """This convolution and then `after`, as one.

        The bias of this one reaches every output through all taps of `after`. That is exact at the borders too, but
        only because the padding of both is moved to the front: there is no zero padding between bias and `after`.
        """
        weight = compose_weights(self.weight, self.shape, after.weight, after.shape)
        groups = after.shape.groups
        reach = after.weight.flatten(2).sum(2)  # what a constant input channel adds to each output
        pushed = torch.einsum(
            "goc,gc->go", reach.reshape(groups, -1, reach.shape[1]), self.bias.reshape(groups, -1)
        ).reshape(-1)
        return Kernel(self.shape.then(after.shape), weight, pushed + after.bias)

    def plus(self, skip: Kernel, *, reuse: bool = False) -> Kernel:
        """This convolution and `skip`, both from the same value, added: the taps of the skip join the kernel.

        With `reuse` the sum may take the memory of this kernel, which nobody must read any more.
        """
        offset = self.shape.offset(skip.shape)
        shape = self.shape.plus(skip.shape)
        assert offset is not None  # plus() has refused what has no offset
        weight = spread(regroup(self.weight, self.shape.groups, shape.groups), self.shape.dilation, shape.dilation)
        added = spread(regroup(skip.weight, skip.shape.groups, shape.groups), skip.shape.dilation, shape.dilation)
        shifted = zip(offset, shape.dilation, added.shape[2:], strict=True)
        window: Any = (..., *(slice(o // grid, o // grid + size) for o, grid, size in shifted))
        weight = weight if reuse else weight.clone()
        weight[window] += added
        return Kernel(shape, weight, self.bias + skip.bias)


# Batch norm in evaluation: one factor and one summand per channel.


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
