"""The calibration of a latency table: what a block costs inside a network, given its time alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Self

from depthfold.errors import InvalidValue
from depthfold.support.document import SPARSE

# The least cost of a block inside a network, as a share of its time alone. A fitted cost <= 0 would make a block free.
LEAST = 0.02
COSTS = ("slope", "per_segment", "per_read", "per_write", "outside", "per_activation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A linear correction, fitted to whole networks. Inside a network a block costs, in milliseconds,

        slope * its time alone + per_segment + per_read * millions of numbers read + per_write * millions written

    and at least LEAST of its time alone. `outside` is the cost of everything else: stem, head, the call of the runtime.
    A block alone also pays its launch and the conversion of its input and output, which a network pays once, so the
    three costs beside the slope are often negative. A fit gives reading and writing the same cost. If a plan leaves out
    the activation of a block, or inserts one, the block costs `per_activation` * millions of numbers written less, or
    more. This is 0 on runtimes that fuse activations, and None if too few networks differed in their activations. Kinds
    of activations with a cost of their own are in `per_kind`, by the names of the kinds.

    The errors are those of predicting each of the `networks` from a fit to all the others.
    """

    slope: float
    per_segment: float
    per_read: float
    per_write: float
    outside: float
    networks: int
    median_error: float
    worst_error: float
    per_activation: float | None = None
    per_kind: tuple[tuple[str, float], ...] = field(default=(), metadata=SPARSE)

    def __post_init__(self) -> None:
        if self.networks < 2:
            raise InvalidValue(f"A calibration needs at least two whole networks, found {self.networks}.")
        costs = [(name, getattr(self, name)) for name in COSTS]
        costs += [(f"per_kind of {kind}", cost) for kind, cost in self.per_kind]
        for name, cost in costs:
            if cost is not None and not math.isfinite(cost):
                raise InvalidValue(f"The {name} of a calibration must be a number, found {cost!r}. Measure again.")
        for name, cost in costs[COSTS.index("per_activation") :]:
            if (cost or 0.0) < 0:
                raise InvalidValue(f"The {name} of a calibration must be 0 or more, found {cost!r}. Measure again.")

    def of_kind(self, kind: str) -> Self:
        """Return the calibration of blocks with this kind of activation: its cost is `per_activation`."""
        return replace(self, per_activation=dict(self.per_kind).get(kind, self.per_activation), per_kind=())

    def in_context(self, time: float, read: float, written: float, activated: float = 0.0) -> float:
        """Return the cost inside a network of a block that takes `time` alone.

        `activated` is the size of the activation that the block has there and not alone; negative for an activation
        that it has only alone.
        """
        return max(self._cost(time, read, written, activated), LEAST * time)

    def is_floored(self, time: float, read: float, written: float, activated: float = 0.0) -> bool:
        """Return True if in_context() returns the least cost of the block."""
        return self._cost(time, read, written, activated) < LEAST * time

    def _cost(self, time: float, read: float, written: float, activated: float) -> float:
        cost = self.slope * time + self.per_segment + self.per_read * read / 1e6 + self.per_write * written / 1e6
        return cost + (self.per_activation or 0.0) * activated / 1e6

    def __str__(self) -> str:
        return (
            f"calibrated on {self.networks} whole networks: each predicted from the others with an error of "
            f"{self.median_error:.1%} in the median, {self.worst_error:.1%} at worst"
        )
