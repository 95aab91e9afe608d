"""How times of blocks alone become times in context."""

from __future__ import annotations

import math
from dataclasses import dataclass

from depthfold.errors import InvalidValue

# Inside a network a block costs this share of its time alone at the least: a fit may come out below nothing for what is
# small, but a block that costs nothing would be worth any number of them.
LEAST = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A linear correction, fitted to whole networks: what a block costs inside a network, in milliseconds, is

        slope * its time alone + per_segment + per_read * millions of numbers read + per_write * millions written

    less per_activation * millions of numbers of the activation that a block has in the table and the plan leaves out,
    and LEAST of its time alone at the least; `outside` is what everything else costs (stem, head, the call of the
    runtime). Alone, a block also pays its own launch and the conversion of its input and output, which a network pays
    once: so the three costs beside the slope are often negative. Where activations are fused into convolutions,
    `per_activation` is about 0.

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
    per_activation: float = 0.0

    def __post_init__(self) -> None:
        if self.networks < 2:
            raise InvalidValue(f"A calibration needs at least two whole networks, found {self.networks}.")
        if not (math.isfinite(self.per_activation) and self.per_activation >= 0):
            raise InvalidValue(
                f"What an activation costs must be milliseconds per million numbers, 0 or more; found per_activation="
                f"{self.per_activation!r}."
            )

    def in_context(self, time: float, read: float, written: float, left_out: float = 0.0) -> float:
        """What a block that takes `time` alone costs inside a network. `left_out` is the size of the activation that it
        has alone and does not have there."""
        cost = self.slope * time + self.per_segment + self.per_read * read / 1e6 + self.per_write * written / 1e6
        return max(cost - self.per_activation * left_out / 1e6, LEAST * time)

    def __str__(self) -> str:
        return (
            f"calibrated on {self.networks} whole networks: each predicted from the others with an error of "
            f"{self.median_error:.1%} in the median, {self.worst_error:.1%} at worst"
        )
