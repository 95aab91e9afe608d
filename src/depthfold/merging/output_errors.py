"""How far two outputs differ, as a share of the largest value, and how far they may."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from depthfold.errors import VerificationError

# Shares of the largest value, by the precision of the weights. Half precision is compared in float32, so that only the
# rounding of the merged weights counts.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 5e-2}

# The outputs may differ by this multiple of the effect of rounding the inputs, because every segment rounds.
SENSITIVITY_FACTOR = 10
CHANGES = 4  # of the inputs, to estimate it


def output_error(wanted: Any, found: Any) -> float:
    """Return the largest error over all tensors of two outputs, or infinity if their structures differ."""
    one, two = _tensors(wanted), _tensors(found)
    if len(one) != len(two):
        return float("inf")
    return max((tensor_error(a, b) for a, b in zip(one, two, strict=True)), default=0.0)


def tensor_error(wanted: Tensor, found: Tensor, scale: Tensor | None = None) -> float:
    """Return the largest difference as a share of `scale`, by default the largest wanted value."""
    if wanted.shape != found.shape:
        return float("inf")
    if not wanted.numel():
        return 0.0
    check_finite(wanted)
    return largest_share((wanted - found).abs(), wanted.abs().max() if scale is None else scale)


def check_finite(wanted: Tensor) -> None:
    if not torch.isfinite(wanted).all():
        raise VerificationError(
            "The network computes values that are not finite, so it cannot be verified. Check its weights and "
            "statistics, or use verify() with your own inputs."
        )


def largest_share(differences: Tensor, scale: Tensor) -> float:
    """Return the largest difference as a share of the scale."""
    difference, largest = float(differences.max()) if differences.numel() else 0.0, float(scale)
    if difference == 0:
        return 0.0
    return difference / largest if largest and difference == difference else float("inf")


def sensitivity(wanted: Any, run: Callable[[Callable[[Tensor], Tensor]], Any]) -> float:
    """Return the largest of a few errors of the outputs after every number of the inputs is changed in its last digit.

    `run` returns the outputs for inputs that are changed by its argument. In a network that amplifies rounding errors,
    single changes differ by a factor of ten.
    """
    return max(output_error(wanted, run(partial(_perturbed, seed=seed))) for seed in range(CHANGES))


def _perturbed(tensor: Tensor, seed: int) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.device, tensor.dtype)
    return tensor * (1 + torch.finfo(tensor.dtype).eps * noise)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
