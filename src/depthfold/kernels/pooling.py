"""Batch norm in training, a clamp and a 2x2 max pool, in the same pass over memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from depthfold.kernels import tiles
from depthfold.kernels.device.pooling import pool, pool_gradient_sums, pool_map_gradient
from depthfold.kernels.norm import Blocks, Norm, coefficients_of, norm_act, statistics_of


def _pooled(y: Tensor, statistics: Tensor, cap: float | None) -> Tensor:
    n, c, h, w = y.shape
    z = torch.empty((n, c, h // 2, w // 2), device=y.device, dtype=y.dtype, memory_format=torch.channels_last)
    pixels, blocks = n * h * w // 4, _blocks(y)
    pool[(blocks.number * tiles.ceil(pixels, blocks.rows),)](
        y, statistics, z, pixels, c // 8, blocks.number, w // 2, cap or 0.0, CAP=cap is not None, **blocks.launch
    )
    return z


def _blocks(y: Tensor) -> Blocks:
    """Return a tile of windows with as many pixels as a tile of the batch norm."""
    blocks = Blocks.of(*tiles.pixels_and_channels(y))
    return blocks._replace(rows=max(1, blocks.rows // 4))


class _NormActPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, sums: Tensor | None, norm: Norm, cap: float | None, *_: Any) -> Tensor:
        statistics = statistics_of(y, sums, norm)
        ctx.save_for_backward(y, statistics)
        ctx.cap, ctx.offset = cap, norm.offset is not None
        return _pooled(y, statistics, cap)

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        y, statistics = ctx.saved_tensors
        dz = tiles.channels_last(dz)
        n, c, h, w = y.shape
        pixels, blocks = n * h * w // 4, _blocks(y)
        rows, programs = tiles.divide_rows(pixels, blocks.rows, blocks.number, tiles.PROGRAMS // 2)
        sums = tiles.empty(y, programs, 2, c)
        options = {"CAP": ctx.cap is not None, **blocks.launch}
        pool_gradient_sums[(blocks.number, programs)](
            dz, y, statistics, sums, pixels, c // 8, w // 2, rows, ctx.cap or 0.0, **options
        )
        coefficients, parameters = coefficients_of(sums, statistics, y, offset=ctx.offset)
        dy = torch.empty_like(y)
        pool_map_gradient[(blocks.number * tiles.ceil(pixels, blocks.rows),)](
            dz, y, statistics, coefficients, dy, pixels, c // 8, blocks.number, w // 2, ctx.cap or 0.0, **options
        )
        return dy, None, None, None, *parameters


def norm_act_pool(y: Tensor, sums: Tensor | None, norm: Norm | Tensor, cap: float | None) -> Tensor:
    """Normalise, clamp to 0..cap, and take the maximum of every 2x2 window."""
    if y.shape[2] % 2 or y.shape[3] % 2:
        return F.max_pool2d(norm_act(y, sums, norm, cap), 2)
    y = tiles.channels_last(y)
    if isinstance(norm, Tensor):
        return _pooled(y, norm, cap)
    return _NormActPool.apply(y, sums, norm, cap, *norm.parameters)  # type: ignore[no-any-return, no-untyped-call]
