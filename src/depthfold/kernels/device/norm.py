"""Kernels for batch norm, with an addition and a clamp.

A map is a matrix of pixels and channels. Sums over pixels are in float32: each program stores its own, and the last
kernel adds them in a fixed order, so that results do not change from run to run. The number of channels is passed in
eights, which tells the compiler that it may read eight channels at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from depthfold.kernels.device.clamp import clamp


@triton.jit(do_not_specialize=["M", "eights", "rows"])
def map_sums(x, sums, M, eights, rows, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):
    """Sum x - pivot and its square. The pivot, the first pixel of the map, avoids the cancellation of large sums."""
    C = eights * 8
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    program = tl.program_id(1)
    pivot = tl.load(x + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    square = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for start in range(0, rows, BLOCK_M):
        m = program * rows + start + tl.arange(0, BLOCK_M)
        mask = (m < M)[:, None] & (c < C)[None, :]
        v = tl.load(x + m.to(tl.int64)[:, None] * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
        d = tl.where(mask, v - pivot, 0.0)
        total += d
        square += d * d
    base = sums + program * 2 * C + c
    tl.store(base, tl.sum(total, 0), mask=c < C)
    tl.store(base + C, tl.sum(square, 0), mask=c < C)


@triton.jit
def _add_programs(sums, c, C, programs, BLOCK_P: tl.constexpr):
    """Return the two sums over all programs."""
    p = tl.arange(0, BLOCK_P)
    mask = (p < programs)[:, None] & (c < C)[None, :]
    at = p[:, None] * 2 * C + c[None, :]
    one = tl.sum(tl.load(sums + at, mask=mask, other=0.0), 0)
    two = tl.sum(tl.load(sums + at + C, mask=mask, other=0.0), 0)
    return one, two


@triton.jit(do_not_specialize=["programs", "M", "eights"])
def batch_statistics(
    pivot, sums, weight, bias, offset, running_mean, running_var, statistics, programs, M, eights, momentum, eps,
    OFFSET: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Compute the statistics from the sums, and update the running statistics."""
    C = eights * 8
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = c < C
    total, square = _add_programs(sums, c, C, programs, BLOCK_P)
    centred = total / M
    var = tl.maximum(square / M - centred * centred, 0.0)
    mean = centred + tl.load(pivot + c, mask=mask, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(var + eps)
    scale = tl.load(weight + c, mask=mask, other=0.0) * rstd
    shift = tl.load(bias + c, mask=mask, other=0.0) - mean * scale
    tl.store(statistics + c, mean, mask=mask)
    tl.store(statistics + C + c, rstd, mask=mask)
    tl.store(statistics + 2 * C + c, scale, mask=mask)
    tl.store(statistics + 3 * C + c, shift, mask=mask)
    if OFFSET:
        mean += tl.load(offset + c, mask=mask, other=0.0)
    old_mean = tl.load(running_mean + c, mask=mask, other=0.0)
    old_var = tl.load(running_var + c, mask=mask, other=0.0)
    unbiased = var * (M / (M - 1.0))
    tl.store(running_mean + c, old_mean + momentum * (mean - old_mean), mask=mask)
    tl.store(running_var + c, old_var + momentum * (unbiased - old_var), mask=mask)


@triton.jit(do_not_specialize=["M", "eights", "blocks"])
def normalise(
    x, residual, statistics, z, M, eights, blocks, cap,
    CAP: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Normalise, add the residual and clamp."""
    C = eights * 8
    c = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    m = tl.program_id(0) // blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = (m < M)[:, None] & (c < C)[None, :]
    at = m.to(tl.int64)[:, None] * C + c[None, :]
    scale = tl.load(statistics + 2 * C + c, mask=c < C, other=0.0)[None, :]
    shift = tl.load(statistics + 3 * C + c, mask=c < C, other=0.0)[None, :]
    v = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) * scale + shift
    if RESIDUAL:
        v += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    if CAP:
        v = clamp(v, cap)
    tl.store(z + at, v.to(z.dtype.element_ty), mask=mask)


@triton.jit
def _before_clamp(d, v, residual, at, mask, scale, shift, cap, CAP: tl.constexpr, RESIDUAL: tl.constexpr):
    """Return the gradient of the value before the clamp, which is 0 where the clamp is flat."""
    if CAP:
        y = v * scale + shift
        if RESIDUAL:
            y += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        d = tl.where((y > 0.0) & (y < cap), d, 0.0)
    return d


@triton.jit(do_not_specialize=["M", "eights", "rows"])
def gradient_sums(
    dz, x, residual, statistics, sums, M, eights, rows, cap,
    CAP: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sum the gradient before the clamp, and its product with the normalised x."""
    C = eights * 8
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    program = tl.program_id(1)
    mean = tl.load(statistics + c, mask=c < C, other=0.0)
    rstd = tl.load(statistics + C + c, mask=c < C, other=0.0)
    scale = tl.load(statistics + 2 * C + c, mask=c < C, other=0.0)[None, :]
    shift = tl.load(statistics + 3 * C + c, mask=c < C, other=0.0)[None, :]
    one = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    two = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for start in range(0, rows, BLOCK_M):
        m = program * rows + start + tl.arange(0, BLOCK_M)
        mask = (m < M)[:, None] & (c < C)[None, :]
        at = m.to(tl.int64)[:, None] * C + c[None, :]
        v = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        d = tl.load(dz + at, mask=mask, other=0.0).to(tl.float32)
        d = _before_clamp(d, v, residual, at, mask, scale, shift, cap, CAP, RESIDUAL)
        one += d
        two += d * (v - mean[None, :])
    base = sums + program * 2 * C + c
    tl.store(base, tl.sum(one, 0), mask=c < C)
    tl.store(base + C, tl.sum(two, 0) * rstd, mask=c < C)


@triton.jit(do_not_specialize=["programs", "M", "eights"])
def gradient_coefficients(
    sums, statistics, coefficients, d_weight, d_bias, d_offset, programs, M, eights,
    OFFSET: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Compute the coefficients of dx = a * d + b * x + c, and the gradients of the parameters."""
    C = eights * 8
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = c < C
    one, two = _add_programs(sums, c, C, programs, BLOCK_P)
    mean = tl.load(statistics + c, mask=mask, other=0.0)
    rstd = tl.load(statistics + C + c, mask=mask, other=0.0)
    scale = tl.load(statistics + 2 * C + c, mask=mask, other=0.0)
    b = -scale * rstd * two / M
    tl.store(coefficients + c, scale, mask=mask)
    tl.store(coefficients + C + c, b, mask=mask)
    tl.store(coefficients + 2 * C + c, -scale * one / M - b * mean, mask=mask)
    tl.store(d_weight + c, two, mask=mask)
    tl.store(d_bias + c, one, mask=mask)
    if OFFSET:
        tl.store(d_offset + c, tl.zeros([BLOCK_C], tl.float32), mask=mask)


@triton.jit(do_not_specialize=["M", "eights", "blocks"])
def map_gradient(
    dz, x, residual, statistics, coefficients, dx, d_residual, M, eights, blocks, cap,
    CAP: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    C = eights * 8
    c = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    m = tl.program_id(0) // blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = (m < M)[:, None] & (c < C)[None, :]
    at = m.to(tl.int64)[:, None] * C + c[None, :]
    v = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    d = tl.load(dz + at, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(statistics + 2 * C + c, mask=c < C, other=0.0)[None, :]
    shift = tl.load(statistics + 3 * C + c, mask=c < C, other=0.0)[None, :]
    d = _before_clamp(d, v, residual, at, mask, scale, shift, cap, CAP, RESIDUAL)
    if RESIDUAL:
        tl.store(d_residual + at, d.to(dx.dtype.element_ty), mask=mask)
    one = tl.load(coefficients + c, mask=c < C, other=0.0)[None, :]
    two = tl.load(coefficients + C + c, mask=c < C, other=0.0)[None, :]
    three = tl.load(coefficients + 2 * C + c, mask=c < C, other=0.0)[None, :]
    tl.store(dx + at, (one * d + two * v + three).to(dx.dtype.element_ty), mask=mask)
