"""Kernels for 1x1 convolutions, with the batch norm and the clamp before them."""

from __future__ import annotations

import triton
import triton.language as tl

from depthfold.kernels.device.clamp import clamp


@triton.jit(do_not_specialize=["M", "K_eights", "N_eights", "rows"])
def pointwise_forward(
    x, weight, statistics, pivot, y, sums, M, K_eights, N_eights, rows, cap,
    CAP: tl.constexpr, SUMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute y = clamp(norm(x)) W^T for x of [M, K] and W of [N, K], and sum y - pivot and its square."""
    K = K_eights * 8
    N = N_eights * 8
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    program = tl.program_id(1)
    centre = tl.load(pivot + n, mask=(n < N) & SUMS, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros([BLOCK_N], tl.float32)
    square = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, rows, BLOCK_M):
        m = program * rows + start + tl.arange(0, BLOCK_M)
        product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for first in range(0, K, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            mask = (m < M)[:, None] & (k < K)[None, :]
            a = tl.load(x + m.to(tl.int64)[:, None] * K + k[None, :], mask=mask, other=0.0)
            scale = tl.load(statistics + 2 * K + k, mask=k < K, other=0.0)[None, :]
            shift = tl.load(statistics + 3 * K + k, mask=k < K, other=0.0)[None, :]
            v = a.to(tl.float32) * scale + shift
            if CAP:
                v = clamp(v, cap)
            w = tl.load(weight + n[None, :] * K + k[:, None], mask=(n < N)[None, :] & (k < K)[:, None], other=0.0)
            product = tl.dot(v.to(a.dtype), w, product, input_precision="ieee")
        mask = (m < M)[:, None] & (n < N)[None, :]
        value = product.to(y.dtype.element_ty)
        tl.store(y + m.to(tl.int64)[:, None] * N + n[None, :], value, mask=mask)
        if SUMS:
            d = tl.where(mask, value.to(tl.float32) - centre, 0.0)
            total += tl.sum(d, 0)
            square += tl.sum(d * d, 0)
    if SUMS:
        base = sums + program * 2 * N + n
        tl.store(base, total, mask=n < N)
        tl.store(base + N, square, mask=n < N)


@triton.jit(do_not_specialize=["M", "K_eights", "N_eights", "rows"])
def pointwise_backward(
    x, weight, statistics, dy, dx, weight_sums, norm_sums, M, K_eights, N_eights, rows, cap,
    CAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute the gradient before the clamp with its sums, and the gradient of W, for BLOCK_K columns of x.

    A tile holds all N, so that both products read dy once.
    """
    K = K_eights * 8
    N = N_eights * 8
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    program = tl.program_id(1)
    n = tl.arange(0, BLOCK_N)
    scale = tl.load(statistics + 2 * K + k, mask=k < K, other=0.0)[None, :]
    shift = tl.load(statistics + 3 * K + k, mask=k < K, other=0.0)[None, :]
    weight_mask = (n < N)[:, None] & (k < K)[None, :]
    w = tl.load(weight + n[:, None] * K + k[None, :], mask=weight_mask, other=0.0)
    one = tl.zeros([BLOCK_K], tl.float32)
    two = tl.zeros([BLOCK_K], tl.float32)
    dw = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in range(0, rows, BLOCK_M):
        m = program * rows + start + tl.arange(0, BLOCK_M)
        mask = (m < M)[:, None] & (k < K)[None, :]
        at = m.to(tl.int64)[:, None] * K + k[None, :]
        g = tl.load(dy + m.to(tl.int64)[:, None] * N + n[None, :], mask=(m < M)[:, None] & (n < N)[None, :], other=0.0)
        raw = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        v = raw * scale + shift
        d = tl.dot(g, w, input_precision="ieee")
        if CAP:
            d = tl.where((v > 0.0) & (v < cap), d, 0.0)
            v = clamp(v, cap)
        dw = tl.dot(tl.trans(g), v.to(g.dtype), dw, input_precision="ieee")
        tl.store(dx + at, d.to(dx.dtype.element_ty), mask=mask)
        one += tl.sum(d, 0)
        two += tl.sum(d * raw, 0)
    base = norm_sums + program * 2 * K + k
    mean = tl.load(statistics + k, mask=k < K, other=0.0)
    rstd = tl.load(statistics + K + k, mask=k < K, other=0.0)
    tl.store(base, one, mask=k < K)
    tl.store(base + K, (two - mean * one) * rstd, mask=k < K)
    tl.store(weight_sums + program.to(tl.int64) * N * K + n[:, None] * K + k[None, :], dw, mask=weight_mask)
