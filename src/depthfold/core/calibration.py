"""How times of blocks alone become times in context."""

from __future__ import annotations

import math
from dataclasses import dataclass

from depthfold.errors import InvalidValue

# Inside a network a block costs this share of its time alone at the least: a fit may come out below nothing for what is
# small, but a block that costs nothing would be worth any number of them.
LEAST = 0.02

# What is fitted (the last of it not always), and what of it makes no sense below 0: longer blocks take longer, and
# nothing gives time back.
COSTS = ("slope", "per_segment", "per_read", "per_write", "outside", "per_activation")
NEVER_NEGATIVE = frozenset({"slope", "outside", "per_activation"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A linear correction, fitted to whole networks: what a block costs inside a network, in milliseconds, is

        slope * its time alone + per_segment + per_read * millions of numbers read + per_write * millions written

    and LEAST of its time alone at the least; `outside` is what everything else costs (stem, head, the call of the
    runtime). Alone, a block also pays its own launch and the conversion of its input and output, which a network pays
    once: so the three costs beside the slope are often negative. The block is one with an activation at its end, or
    without: where the plan has it otherwise, that takes `per_activation` * millions of its numbers less, or more. It is
    0 where activations are fused into convolutions, and None where too few networks had them otherwise to see it.

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

    def __post_init__(self) -> None:
        if self.networks < 2:
            raise InvalidValue(f"A calibration needs at least two whole networks, found {self.networks}.")
        for name in COSTS:
            cost = getattr(self, name)
            if cost is not None and not math.isfinite(cost):
                raise InvalidValue(f"The {name} of a calibration must be a number, found {cost!r}. Measure again.")
        if self.per_activation is not None and self.per_activation < 0:
            raise InvalidValue(
                f"The per_activation of a calibration must be a number, 0 or more, found {self.per_activation!r}. "
                "Measure again."
            )

    def in_context(self, time: float, read: float, written: float, activated: float = 0.0) -> float:
        """What a block that takes `time` alone costs inside a network. `activated` is the size of the activation that
        it has there and not alone; less than 0 for one that it has alone and not there."""
        cost = self.slope * time + self.per_segment + self.per_read * read / 1e6 + self.per_write * written / 1e6
        return max(cost + (self.per_activation or 0.0) * activated / 1e6, LEAST * time)

    def __str__(self) -> str:
        return (
            f"calibrated on {self.networks} whole networks: each predicted from the others with an error of "
            f"{self.median_error:.1%} in the median, {self.worst_error:.1%} at worst"
        )
