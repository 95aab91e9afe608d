"""A measured speed-up: two networks that were timed in the same rounds, and whether their ratio can be relied on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

# The widest interquartile range of a reliable time, as a share of its median: twice what the timer aims at. Other
# processes interrupt a long network more often than a short one, so their load does not cancel in the ratio.
WIDEST = 0.2

Quartiles = tuple[float, float, float]


def quartiles(samples: Sequence[float]) -> Quartiles:
    """Return the first quartile, the median and the third quartile."""
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    low, _, high = quantiles(samples, n=4, method="inclusive")
    return low, median(samples), high


def relative_spread(quartiles: Quartiles) -> float:
    """Return the interquartile range as a share of the median."""
    low, middle, high = quartiles
    return (high - low) / middle if middle else 0.0


def why_unreliable(times: Mapping[str, Quartiles]) -> str | None:
    """Return why these times by name are unreliable, as a part of a sentence; None if they are not."""
    wide = [f"{name} took {of[0]:.4g} to {of[2]:.4g} ms" for name, of in times.items() if relative_spread(of) > WIDEST]
    return f"{' and '.join(wide)}; something else was probably running" if wide else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSpeedup:
    """The quartiles of the times of a network and of its original, in milliseconds."""

    original: Quartiles
    network: Quartiles

    @property
    def latency(self) -> float:
        """The median time of the network."""
        return self.network[1]

    @property
    def original_latency(self) -> float:
        """The median time of the original."""
        return self.original[1]

    @property
    def factor(self) -> float:
        """The median time of the original divided by that of the network."""
        return self.original_latency / max(self.latency, 1e-12)

    @property
    def share(self) -> float:
        """The median time of the network as a share of the original's."""
        return self.latency / max(self.original_latency, 1e-12)

    @property
    def unreliable(self) -> str | None:
        """Why the speed-up is unreliable, as a part of a sentence; None if it is not."""
        return why_unreliable({"the original": self.original, "the compressed network": self.network})

    def __str__(self) -> str:
        return f"{self.factor:.2f}x as fast" + (", unreliable" if self.unreliable else "")
