"""Convolutions that normalise and clamp the map as they read it, with gradients.

The normalised map is never written. As a convolution writes its output, it also computes the sums that the next batch
norm needs. Its backward applies the derivative of the clamp, and computes the sums for the batch norm before it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from depthfold.kernels import tiles
from depthfold.kernels.device.depthwise import depthwise_backward, depthwise_forward
from depthfold.kernels.device.partials import add_partials
from depthfold.kernels.device.pointwise import pointwise_backward, pointwise_forward
from depthfold.kernels.norm import Norm, apply_coefficients, coefficients_of, statistics_of


class Depthwise(NamedTuple):
    """The geometry of a depthwise convolution, whose kernel is square and odd.

    `before` and `after` are the rows and the columns of zeros before and after the map.
    """

    stride: int
    before: tuple[int, int]
    after: tuple[int, int]

    def output_size(self, size: tuple[int, int], kernel: int) -> tuple[int, int]:
        rows, columns = (
            (pixels + first + last - kernel) // self.stride + 1
            for pixels, first, last in zip(size, self.before, self.after, strict=True)
        )
        return rows, columns


class Before(NamedTuple):
    """The batch norm and the clamp before a convolution. Without statistics, there is no batch norm."""

    statistics: Tensor | None
    cap: float | None

    @property
    def launch(self) -> dict[str, bool]:
        return {"CAP": self.cap is not None}


def convolve(
    x: Tensor, sums: Tensor | None, norm: Norm | Tensor | None, cap: float | None, weight: Tensor,
    depthwise: Depthwise | None, pivot: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Normalise, clamp to 0..cap and convolve: depthwise if a geometry is given, with a 1x1 kernel otherwise.

    Return the output. If `pivot`, the running mean of the batch norm after it, is given, also return the sums for it.
    """
    x, weight = tiles.channels_last(x), weight.contiguous()
    if isinstance(norm, Tensor):
        return _forward(x, weight, Before(norm, cap), depthwise, pivot)
    parameters = () if norm is None else norm.parameters
    return _Convolve.apply(x, sums, norm, cap, weight, depthwise, pivot, *parameters)  # type: ignore[no-any-return, no-untyped-call]


def pointwise(x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int]) -> Tensor:
    """Convolve with a 1x1 kernel. With many outputs, this matrix product of cuBLAS is faster than a kernel of ours."""
    if any(padding):
        x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    return F.linear(tiles.channels_last(x).permute(0, 2, 3, 1), weight.flatten(1), bias).permute(0, 3, 1, 2)


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sums: Tensor | None, norm: Norm | None, cap: float | None, weight: Tensor,
        depthwise: Depthwise | None, pivot: Tensor | None, *_: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        before = Before(None if norm is None else statistics_of(x, sums, norm), cap)
        output, output_sums = _forward(x, weight, before, depthwise, pivot)
        ctx.save_for_backward(x, weight, before.statistics)
        ctx.cap, ctx.depthwise, ctx.offset = cap, depthwise, norm is not None and norm.offset is not None
        if output_sums is not None:
            ctx.mark_non_differentiable(output_sums)
        return output, output_sums

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, statistics = ctx.saved_tensors
        before, dy = Before(statistics, ctx.cap), tiles.channels_last(gradients[0])
        dx, d_weight, sums = _backward(x, weight, dy, before, ctx.depthwise)
        results = (dx, None, None, None, d_weight, None, None)
        if sums is None:
            return results
        coefficients, parameters = coefficients_of(sums, statistics, x, offset=ctx.offset)
        apply_coefficients(dx, x, statistics, coefficients)
        return *results, *parameters


def _forward(
    x: Tensor, weight: Tensor, before: Before, depthwise: Depthwise | None, pivot: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    if depthwise is None:
        return _pointwise_forward(x, weight, before, pivot)
    return _depthwise_forward(x, weight, before, depthwise, pivot)


def _backward(
    x: Tensor, weight: Tensor, dy: Tensor, before: Before, depthwise: Depthwise | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients before the clamp and of the weight, and the sums for the gradient of the batch norm."""
    if depthwise is None:
        return _pointwise_backward(x, weight, dy, before)
    return _depthwise_backward(x, weight, dy, before, depthwise)


def _depthwise_forward(
    x: Tensor, weight: Tensor, before: Before, conv: Depthwise, pivot: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    (n, c, h, w), k = x.shape, weight.shape[-1]
    out_h, out_w = conv.output_size((h, w), k)
    y = torch.empty((n, c, out_h, out_w), device=x.device, dtype=x.dtype, memory_format=torch.channels_last)
    grid = tiles.depthwise_grid(tiles.DEPTHWISE_FORWARD[n * out_h * out_w < tiles.LARGE], out_w, c, n)
    sums = None if pivot is None else tiles.empty(x, grid.programs, 2, c)
    depthwise_forward[(tiles.ceil(c, grid.block_c), grid.programs)](
        x, weight, _or(before.statistics, x), _or(pivot, x), y, _or(sums, x), n, h, w, out_h, out_w, c // 8,
        *conv.before, grid.across, grid.images, before.cap or 0.0,
        K=k, STRIDE=conv.stride, NORM=before.statistics is not None, SUMS=pivot is not None,
        **before.launch, **grid.launch,
    )  # fmt: skip
    return y, sums


def _depthwise_backward(
    x: Tensor, weight: Tensor, dy: Tensor, before: Before, conv: Depthwise
) -> tuple[Tensor, Tensor, Tensor | None]:
    (n, c, h, w), k = x.shape, weight.shape[-1]
    dx = torch.empty_like(x)
    grid = tiles.depthwise_grid(tiles.DEPTHWISE_BACKWARD[n * h * w < tiles.LARGE], w, c, n, conv.stride)
    weight_sums = tiles.empty(x, grid.programs, k * k, c)
    norm_sums = None if before.statistics is None else tiles.empty(x, grid.programs, 2, c)
    depthwise_backward[(tiles.ceil(c, grid.block_c), grid.programs)](
        x, weight, _or(before.statistics, x), dy, dx, weight_sums, _or(norm_sums, x), n, h, w, *dy.shape[2:], c // 8,
        *conv.before, grid.across, grid.images, before.cap or 0.0,
        K=k, STRIDE=conv.stride, PHASE_H=conv.before[0] % conv.stride, PHASE_W=conv.before[1] % conv.stride,
        NORM=before.statistics is not None, **before.launch, **grid.launch,
    )  # fmt: skip
    return dx, _weight_gradient(weight_sums, weight, taps=k * k), norm_sums


def _pointwise_forward(x: Tensor, weight: Tensor, before: Before, pivot: Tensor | None) -> tuple[Tensor, Tensor | None]:
    (pixels, inputs), outputs = tiles.pixels_and_channels(x), weight.shape[0]
    n, _, h, w = x.shape
    y = torch.empty((n, outputs, h, w), device=x.device, dtype=x.dtype, memory_format=torch.channels_last)
    tile = tiles.POINTWISE_FORWARD[pixels < tiles.LARGE]
    block_n = tiles.channels_block(outputs, tile.columns)
    block_k = min(tile.depth, max(16, triton.next_power_of_2(inputs)))
    while block_k > 16 and tiles.ceil(inputs, block_k) * block_k > 1.3 * inputs:
        block_k //= 2
    blocks = tiles.ceil(outputs, block_n)
    rows, programs = tiles.divide_rows(pixels, tile.rows, blocks)
    sums = None if pivot is None else tiles.empty(x, programs, 2, outputs)
    pointwise_forward[(blocks, programs)](
        x, weight, before.statistics, _or(pivot, x), y, _or(sums, x), pixels, inputs // 8, outputs // 8, rows,
        before.cap or 0.0, SUMS=pivot is not None, BLOCK_M=tile.rows, BLOCK_N=block_n, BLOCK_K=block_k,
        **before.launch, **tile.launch,
    )  # fmt: skip
    return y, sums


def _pointwise_backward(x: Tensor, weight: Tensor, dy: Tensor, before: Before) -> tuple[Tensor, Tensor, Tensor]:
    (pixels, inputs), outputs = tiles.pixels_and_channels(x), weight.shape[0]
    tile = tiles.POINTWISE_BACKWARD[pixels < tiles.LARGE]
    block_k = tiles.channels_block(inputs, tile.columns)
    blocks = tiles.ceil(inputs, block_k)
    # Only as many programs as fill the GPU, because each stores a gradient of all its weights.
    rows, programs = tiles.divide_rows(pixels, tile.rows, blocks, tiles.PROGRAMS // 2)
    dx = torch.empty_like(x)
    weight_sums, norm_sums = tiles.empty(x, programs, outputs, inputs), tiles.empty(x, programs, 2, inputs)
    pointwise_backward[(blocks, programs)](
        x, weight, before.statistics, dy, dx, weight_sums, norm_sums, pixels, inputs // 8, outputs // 8, rows,
        before.cap or 0.0, BLOCK_M=tile.rows, BLOCK_N=max(16, triton.next_power_of_2(outputs)), BLOCK_K=block_k,
        **before.launch, **tile.launch,
    )  # fmt: skip
    return dx, _weight_gradient(weight_sums, weight), norm_sums


def _weight_gradient(sums: Tensor, weight: Tensor, *, taps: int = 0) -> Tensor:
    """Return the sum over all programs. With `taps`, the sums have a row of channels for each weight of a kernel."""
    gradient = torch.empty_like(weight)
    add_partials[(tiles.ceil(weight.numel(), 32),)](
        sums, gradient, len(sums), weight.numel(), len(weight), TAPS=taps, BLOCK_P=64, BLOCK_X=32, num_warps=4
    )
    return gradient


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Return the tensor, or another one where a kernel reads none."""
    return other if tensor is None else tensor
