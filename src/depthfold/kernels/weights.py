"""Weights in the precision of the computation: one cast of all of them in each direction.

torch.autocast casts the weights one by one, and so their gradients. Here a single launch casts all weights before the
forward, and a single one casts all gradients after the backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def prepare(x: Any, dtype: torch.dtype | None = None) -> Any:
    """Return a map channels-last, in `dtype` or in the precision of autocast if it is enabled.

    Other inputs stay as they are: autocast does not round them either.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() != 4:
        return x
    if dtype is None and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype or x.dtype, memory_format=torch.channels_last)


def cast(x: Any, *weights: Tensor) -> tuple[Tensor, ...]:
    """Return the weights in the precision of the input x."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or all(w.dtype == x.dtype for w in weights):
        return weights
    return _Cast.apply(x.dtype, *weights)  # type: ignore[no-any-return, no-untyped-call]


def count(*batches: Tensor) -> None:
    """Add 1 to the `num_batches_tracked` of the batch norms."""
    torch._foreach_add_(batches, 1)


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*weights)
        copies = [torch.empty_like(weight, dtype=dtype) for weight in weights]
        torch._foreach_copy_(copies, weights)
        ctx.mark_non_differentiable(*(copy for copy, w in zip(copies, weights, strict=True) if not w.requires_grad))
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        weights = ctx.saved_tensors
        pairs = [(w, g) for w, g in zip(weights, gradients, strict=True) if g is not None]
        results = [torch.empty_like(w) for w, _ in pairs]
        torch._foreach_copy_(results, [_laid_out_like(w, g) for w, g in pairs])
        remaining = iter(results)
        return None, *(None if g is None else next(remaining) for g in gradients)


def _laid_out_like(weight: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient with the strides of the weight. A list of tensors is copied at once only if they agree."""
    if gradient.stride() == weight.stride():
        return gradient
    for layout in (torch.contiguous_format, torch.channels_last):
        if layout is torch.channels_last and weight.dim() != 4:
            continue
        if weight.is_contiguous(memory_format=layout) and gradient.is_contiguous(memory_format=layout):
            return gradient.as_strided(weight.size(), weight.stride())  # only sizes of 1 have other strides
    return torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)
