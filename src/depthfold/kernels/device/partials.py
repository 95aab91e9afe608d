"""The kernel that adds the weight gradients of all programs."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["programs", "size", "channels"])
def add_partials(
    partials, result, programs, size, channels, NINE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_X: tl.constexpr
):
    """Add the rows. With NINE, nine rows of weights, one per tap, become [channels, 9]."""
    x = tl.program_id(0) * BLOCK_X + tl.arange(0, BLOCK_X)
    total = tl.zeros([BLOCK_P, BLOCK_X], tl.float32)
    for start in range(0, programs, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        mask = (p < programs)[:, None] & (x < size)[None, :]
        total += tl.load(partials + p.to(tl.int64)[:, None] * size + x[None, :], mask=mask, other=0.0)
    at = (x % channels) * 9 + x // channels if NINE else x
    tl.store(result + at, tl.sum(total, 0).to(result.dtype.element_ty), mask=x < size)
