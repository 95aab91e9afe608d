"""The guard of a module that was recorded for maps of one size."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from depthfold.core.shape import SizeRule
from depthfold.errors import InputSizeError


@dataclass(frozen=True, slots=True)
class SizeCheck:
    """A rule for a map further on: along the dimension `dim`, that map has (size + shift) // stride + 1 values if the
    input has `size`."""

    dim: int
    rule: SizeRule
    shift: int = -1
    stride: int = 1

    def size_there(self, size: int) -> int:
        return (size + self.shift) // self.stride + 1


class SizeGuard(nn.Module):
    """Pass the input on, and refuse one of a size at which the network would have to pad differently."""

    def __init__(self, where: str, checks: tuple[SizeCheck, ...]) -> None:
        super().__init__()
        self.where, self.checks = where, checks

    def forward(self, x: Tensor) -> Tensor:
        for check in self.checks:
            if not check.rule.allows(check.size_there(x.shape[check.dim])):
                raise InputSizeError(self.message("x".join(map(str, x.shape[2:]))))
        return x

    def message(self, size: str = "this size") -> str:
        """Say what is wrong with a map of this size. An assertion of the merged network does not know the size."""
        return (
            f"The padding of {self.where} depends on the size of the input, and at {size} it is not the traced one. "
            "Trace the model at this size, or give inputs of a size that print(network) allows."
        )

    def extra_repr(self) -> str:
        return self.where
