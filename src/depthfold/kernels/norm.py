"""Batch norm in training, with an addition and a clamp in the same pass over memory.

`statistics` are four rows: mean, 1 / deviation, scale and shift, where x * scale + shift is the output. `sums` are the
sums of each program of a kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from depthfold.kernels import tiles
from depthfold.kernels.device.norm import (
    batch_statistics,
    gradient_coefficients,
    gradient_sums,
    map_gradient,
    map_sums,
    normalise,
)


class Norm(NamedTuple):
    """The tensors and numbers of a batch norm in training. `offset` is the bias of the convolution before it.

    The output does not depend on this bias, so the convolution leaves it out. Only the running mean includes it.
    """

    weight: Tensor
    bias: Tensor
    offset: Tensor | None
    running_mean: Tensor
    running_var: Tensor
    momentum: float
    eps: float

    @property
    def parameters(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.weight, self.bias, self.offset


Gradients = tuple[Tensor, Tensor, Tensor | None]  # of the parameters


@torch.no_grad()
def fold(norm: Norm) -> Tensor:
    """Return the statistics of a batch norm in evaluation mode."""
    rstd = (norm.running_var + norm.eps).rsqrt()
    mean = norm.running_mean if norm.offset is None else norm.running_mean - norm.offset
    scale = norm.weight * rstd
    return torch.stack([mean, rstd, scale, norm.bias - mean * scale])


class Blocks(NamedTuple):
    """The tile of a kernel without neighbourhoods, and the number of blocks of channels."""

    rows: int
    channels: int
    number: int
    warps: int

    @classmethod
    def of(cls, pixels: int, channels: int) -> Blocks:
        tile = tiles.NORM[pixels < tiles.LARGE]
        size = tiles.channels_block(channels, tile.channels if channels % 64 == 0 else 256)
        return cls(max(1, tile.elements // size), size, tiles.ceil(channels, size), tile.warps)

    @property
    def launch(self) -> dict[str, int]:
        return {"BLOCK_M": self.rows, "BLOCK_C": self.channels, "num_warps": self.warps}


def _final(programs: int) -> dict[str, int]:
    """Return the launch options of a kernel that adds the sums of all programs."""
    return {"BLOCK_P": triton.next_power_of_2(programs), "BLOCK_C": 8, "num_warps": 8 if programs > 512 else 4}


def statistics_of(y: Tensor, sums: Tensor | None, norm: Norm) -> Tensor:
    """Return the statistics of a map, and update the running ones.

    `sums` are sums of differences from the running mean. If there are none, sums are computed here.
    """
    pixels, channels = tiles.pixels_and_channels(y)
    pivot = norm.running_mean
    if sums is None:
        blocks = Blocks.of(pixels, channels)
        rows, programs = tiles.divide_rows(pixels, blocks.rows, blocks.number, tiles.PROGRAMS // 2)
        sums, pivot = tiles.empty(y, programs, 2, channels), y
        map_sums[(blocks.number, programs)](y, sums, pixels, channels // 8, rows, **blocks.launch)
    statistics = tiles.empty(y, 4, channels)
    offset = norm.bias if norm.offset is None else norm.offset
    batch_statistics[(channels // 8,)](
        pivot, sums, norm.weight, norm.bias, offset, norm.running_mean, norm.running_var, statistics, len(sums),
        pixels, channels // 8, norm.momentum, norm.eps, OFFSET=norm.offset is not None, **_final(len(sums)),
    )  # fmt: skip
    return statistics


def coefficients_of(sums: Tensor, statistics: Tensor, y: Tensor, *, offset: bool) -> tuple[Tensor, Gradients]:
    """Return the coefficients of the map's gradient, and the gradients of weight, bias and offset."""
    pixels, channels = tiles.pixels_and_channels(y)
    coefficients = tiles.empty(y, 3, channels)
    d_weight, d_bias = tiles.empty(y, channels), tiles.empty(y, channels)
    d_offset = tiles.empty(y, channels) if offset else None
    gradient_coefficients[(channels // 8,)](
        sums, statistics, coefficients, d_weight, d_bias, d_bias if d_offset is None else d_offset, len(sums), pixels,
        channels // 8, OFFSET=offset, **_final(len(sums)),
    )  # fmt: skip
    return coefficients, (d_weight, d_bias, d_offset)


def apply_coefficients(d: Tensor, y: Tensor, statistics: Tensor, coefficients: Tensor) -> Tensor:
    """Turn d, the gradient before the clamp, into the gradient of y, in place."""
    return _gradient(d, y, None, statistics, coefficients, None, d, d)


def _gradient(
    dz: Tensor, y: Tensor, residual: Tensor | None, statistics: Tensor, coefficients: Tensor, cap: float | None,
    dy: Tensor, d_residual: Tensor,
) -> Tensor:  # fmt: skip
    pixels, channels = tiles.pixels_and_channels(y)
    blocks = Blocks.of(pixels, channels)
    map_gradient[(blocks.number * tiles.ceil(pixels, blocks.rows),)](
        dz, y, y if residual is None else residual, statistics, coefficients, dy, d_residual, pixels, channels // 8,
        blocks.number, cap or 0.0, CAP=cap is not None, RESIDUAL=residual is not None, **blocks.launch,
    )  # fmt: skip
    return dy


def _normalise(y: Tensor, statistics: Tensor, cap: float | None, residual: Tensor | None) -> Tensor:
    pixels, channels = tiles.pixels_and_channels(y)
    blocks = Blocks.of(pixels, channels)
    z = torch.empty_like(y)
    normalise[(blocks.number * tiles.ceil(pixels, blocks.rows),)](
        y, y if residual is None else residual, statistics, z, pixels, channels // 8, blocks.number, cap or 0.0,
        CAP=cap is not None, RESIDUAL=residual is not None, **blocks.launch,
    )  # fmt: skip
    return z


class _NormAct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, sums: Tensor | None, norm: Norm, cap: float | None, residual: Tensor | None, *_: Any
    ) -> Tensor:
        statistics = statistics_of(y, sums, norm)
        ctx.save_for_backward(y, statistics, residual if cap is not None else None)
        ctx.cap, ctx.added, ctx.offset = cap, residual is not None, norm.offset is not None
        return _normalise(y, statistics, cap, residual)

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        y, statistics, residual = ctx.saved_tensors
        dz = tiles.channels_last(dz)
        pixels, channels = tiles.pixels_and_channels(y)
        blocks = Blocks.of(pixels, channels)
        rows, programs = tiles.divide_rows(pixels, blocks.rows, blocks.number, tiles.PROGRAMS // 2)
        sums = tiles.empty(y, programs, 2, channels)
        gradient_sums[(blocks.number, programs)](
            dz, y, y if residual is None else residual, statistics, sums, pixels, channels // 8, rows, ctx.cap or 0.0,
            CAP=ctx.cap is not None, RESIDUAL=residual is not None, **blocks.launch,
        )  # fmt: skip
        coefficients, parameters = coefficients_of(sums, statistics, y, offset=ctx.offset)
        dy = torch.empty_like(y)
        d_residual = dz if residual is None else torch.empty_like(y)
        _gradient(dz, y, residual, statistics, coefficients, ctx.cap, dy, d_residual)
        return dy, None, None, None, d_residual if ctx.added else None, *parameters


def norm_act(
    y: Tensor, sums: Tensor | None, norm: Norm | Tensor, cap: float | None, residual: Tensor | None = None
) -> Tensor:
    """Normalise, add the residual, and clamp to 0..cap. With a cap of None, nothing is clamped."""
    y = tiles.channels_last(y)
    if residual is not None and (residual.shape != y.shape or residual.dtype != y.dtype):
        z = norm_act(y, sums, norm, None) + residual
        return z if cap is None else z.clamp(0, cap)
    residual = None if residual is None else tiles.channels_last(residual)
    if isinstance(norm, Tensor):
        return _normalise(y, norm, cap, residual)
    return _NormAct.apply(y, sums, norm, cap, residual, *norm.parameters)  # type: ignore[no-any-return, no-untyped-call]
