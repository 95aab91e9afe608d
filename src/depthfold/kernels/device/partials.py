"""The kernel that adds the weight gradients of all programs."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["programs", "size", "channels"])
def add_partials(
    partials, result, programs, size, channels, TAPS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_X: tl.constexpr
):
    """Add the rows. With TAPS, that many rows of weights, one per tap, become [channels, TAPS]."""
    x = tl.program_id(0) * BLOCK_X + tl.arange(0, BLOCK_X)
    total = tl.zeros([BLOCK_P, BLOCK_X], tl.float32)
    for start in range(0, programs, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        mask = (p < programs)[:, None] & (x < size)[None, :]
        total += tl.load(partials + p.to(tl.int64)[:, None] * size + x[None, :], mask=mask, other=0.0)
    at = (x % channels) * TAPS + x // channels if TAPS else x
    tl.store(result + at, tl.sum(total, 0).to(result.dtype.element_ty), mask=x < size)
