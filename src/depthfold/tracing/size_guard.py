"""A guard for modules that were recorded for maps of one size."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from depthfold.core import SizeRule
from depthfold.errors import InputSizeError


@dataclass(frozen=True, slots=True)
class SizeCheck:
    """A rule for a later map, whose size along the dimension `dim` is (size + shift) // stride + 1."""

    dim: int
    rule: SizeRule
    shift: int = -1
    stride: int = 1


class SizeGuard(nn.Module):
    """Return the input, and raise InputSizeError if the network would need different padding for its size."""

    def __init__(self, where: str, checks: tuple[SizeCheck, ...]) -> None:
        super().__init__()
        self.where, self.checks = where, checks

    def forward(self, x: Tensor) -> Tensor:
        for check in self.checks:
            if not check.rule.allows((x.shape[check.dim] + check.shift) // check.stride + 1):
                raise InputSizeError(self.message("x".join(map(str, x.shape[2:]))))
        return x

    def message(self, size: str = "this size") -> str:
        """Return the error message. The assertions of a merged network do not know the size."""
        return (
            f"The padding of {self.where} depends on the size of the input, and at {size} it differs from the traced "
            "padding. Trace the model at this size, or use a size that print(network) allows."
        )

    def extra_repr(self) -> str:
        return self.where
