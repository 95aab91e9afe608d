"""The activation of the kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def clamp(v, cap):
    """Clamp to 0..cap. NaN stays NaN, as in PyTorch, so that a loss shows when a training run diverges."""
    positive = tl.maximum(v, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(positive, cap, propagate_nan=tl.PropagateNan.ALL)
