"""How far apart two outputs are, and how far a change in the last digit of the input takes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from depthfold.errors import VerificationError


def output_error(wanted: Any, found: Any) -> float:
    """The largest error of all the tensors in two outputs of the same structure; infinite where they do not match."""
    one, two = _tensors(wanted), _tensors(found)
    if len(one) != len(two):
        return float("inf")
    return max((tensor_error(a, b) for a, b in zip(one, two, strict=True)), default=0.0)


def tensor_error(wanted: Tensor, found: Tensor, scale: Tensor | None = None) -> float:
    """The largest difference, as a share of the largest wanted value."""
    if wanted.shape != found.shape:
        return float("inf")
    if not wanted.numel():
        return 0.0
    check_finite(wanted)
    return share((wanted - found).abs(), wanted.abs().max() if scale is None else scale)


def check_finite(wanted: Tensor) -> None:
    if not torch.isfinite(wanted).all():
        raise VerificationError(
            "The network yields values that are not finite, so nothing can be verified. Check its weights and "
            "statistics, or verify with inputs of your own."
        )


def share(differences: Tensor, scale: Tensor) -> float:
    """The largest of the differences, as a share of the scale."""
    difference, largest = float(differences.max()) if differences.numel() else 0.0, float(scale)
    if difference == 0:
        return 0.0
    return difference / largest if largest and difference == difference else float("inf")


def last_digit(tensor: Tensor) -> Tensor:
    """The same tensor, every number changed in its last digit."""
    if not tensor.is_floating_point():
        return tensor
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.device, tensor.dtype)
    return tensor * (1 + torch.finfo(tensor.dtype).eps * noise)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
