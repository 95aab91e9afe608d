"""Kernels for batch norm, a clamp and a 2x2 max pool.

Only the pooled map is written. The backward finds the maximum of each window again, so no indices are stored. A pixel
of the pooled map is a row of a matrix; its window is two pixels in two rows of the map.
"""

from __future__ import annotations

import triton
import triton.language as tl

from depthfold.kernels.device.clamp import clamp


@triton.jit
def _window(x, m, c, M, C, half):
    """Load the four pixels of each window. Return them in float32, their addresses and the mask."""
    mask = (m < M)[:, None] & (c < C)[None, :]
    first = (m // half).to(tl.int64) * 4 * half + m % half * 2  # a row of windows is two rows of x
    at = first[:, None] * C + c[None, :]
    below = at + 2 * half * C
    a = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + at + C, mask=mask, other=0.0).to(tl.float32)
    d = tl.load(x + below, mask=mask, other=0.0).to(tl.float32)
    e = tl.load(x + below + C, mask=mask, other=0.0).to(tl.float32)
    return (a, b, d, e), (at, at + C, below, below + C), mask


@triton.jit
def _maximum(values, scale, shift):
    """Return the largest normalised value of each window."""
    best = values[0] * scale + shift
    for i in tl.static_range(1, 4):
        best = tl.maximum(best, values[i] * scale + shift, propagate_nan=tl.PropagateNan.ALL)
    return best


@triton.jit(do_not_specialize=["M", "eights", "blocks", "half"])
def pool(
    x, statistics, z, M, eights, blocks, half, cap, CAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr
):
    C = eights * 8
    c = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    m = tl.program_id(0) // blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    scale = tl.load(statistics + 2 * C + c, mask=c < C, other=0.0)[None, :]
    shift = tl.load(statistics + 3 * C + c, mask=c < C, other=0.0)[None, :]
    values, _, mask = _window(x, m, c, M, C, half)
    best = _maximum(values, scale, shift)
    if CAP:
        best = clamp(best, cap)
    tl.store(z + m.to(tl.int64)[:, None] * C + c[None, :], best.to(z.dtype.element_ty), mask=mask)


@triton.jit
def _load_gradient(dz, m, c, C, best, cap, mask, CAP: tl.constexpr):
    """Load the gradient of the maximum before the clamp."""
    d = tl.load(dz + m.to(tl.int64)[:, None] * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
    if CAP:
        d = tl.where((best > 0.0) & (best < cap), d, 0.0)
    return d


@triton.jit(do_not_specialize=["M", "eights", "half", "rows"])
def pool_gradient_sums(
    dz, x, statistics, sums, M, eights, half, rows, cap,
    CAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sum the gradient before the clamp, and its product with the normalised x."""
    C = eights * 8
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    program = tl.program_id(1)
    mean = tl.load(statistics + c, mask=c < C, other=0.0)[None, :]
    rstd = tl.load(statistics + C + c, mask=c < C, other=0.0)
    scale = tl.load(statistics + 2 * C + c, mask=c < C, other=0.0)[None, :]
    shift = tl.load(statistics + 3 * C + c, mask=c < C, other=0.0)[None, :]
    one = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    two = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for start in range(0, rows, BLOCK_M):
        m = program * rows + start + tl.arange(0, BLOCK_M)
        values, _, mask = _window(x, m, c, M, C, half)
        best = _maximum(values, scale, shift)
        d = _load_gradient(dz, m, c, C, best, cap, mask, CAP)
        largest = values[3]
        for i in tl.static_range(3):
            largest = tl.where(values[2 - i] * scale + shift == best, values[2 - i], largest)
        one += d
        two += d * (largest - mean)
    base = sums + program * 2 * C + c
    tl.store(base, tl.sum(one, 0), mask=c < C)
    tl.store(base + C, tl.sum(two, 0) * rstd, mask=c < C)


@triton.jit(do_not_specialize=["M", "eights", "blocks", "half"])
def pool_map_gradient(
    dz, x, statistics, coefficients, dx, M, eights, blocks, half, cap,
    CAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    C = eights * 8
    c = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    m = tl.program_id(0) // blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    scale = tl.load(statistics + 2 * C + c, mask=c < C, other=0.0)[None, :]
    shift = tl.load(statistics + 3 * C + c, mask=c < C, other=0.0)[None, :]
    one = tl.load(coefficients + c, mask=c < C, other=0.0)[None, :]
    two = tl.load(coefficients + C + c, mask=c < C, other=0.0)[None, :]
    three = tl.load(coefficients + 2 * C + c, mask=c < C, other=0.0)[None, :]
    values, at, mask = _window(x, m, c, M, C, half)
    best = _maximum(values, scale, shift)
    d = one * _load_gradient(dz, m, c, C, best, cap, mask, CAP)
    for i in tl.static_range(4):
        chosen = values[i] * scale + shift == best
        out = tl.where(chosen, d, 0.0) + two * values[i] + three
        d = tl.where(chosen, 0.0, d)  # of equal values, the first takes the gradient
        tl.store(dx + at[i], out.to(dx.dtype.element_ty), mask=mask)
