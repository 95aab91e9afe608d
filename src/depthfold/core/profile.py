"""What a network costs, as it was measured. The measuring itself is in `latency`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median, quantiles
from typing import ClassVar

from depthfold.core.environment import Environment
from depthfold.core.network import text_table
from depthfold.errors import InvalidValue
from depthfold.support.document import Document
from depthfold.support.text import amount


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile(Document):
    """What a network costs. `flops` counts a multiplication and an addition as two, as PyTorch's counter does; papers
    often print multiply-adds, which are half of it. `memory` is in bytes, weights included; None with the reason where
    it could not be measured."""

    FORMAT: ClassVar[str] = "depthfold.profile"

    environment: Environment
    samples: tuple[float, ...]
    flops: int
    parameters: int
    depth: int
    memory: int | None
    memory_reason: str | None = None

    def __post_init__(self) -> None:
        if not self.samples:
            raise InvalidValue("A profile needs at least one sample of the latency, found none. Measure the network.")

    @property
    def latency(self) -> float:
        """The median in milliseconds."""
        return median(self.samples)

    @property
    def spread(self) -> tuple[float, float]:
        """The middle half of the samples."""
        if len(self.samples) == 1:
            return self.samples[0], self.samples[0]
        low, _, high = quantiles(self.samples, n=4, method="inclusive")
        return low, high

    def __str__(self) -> str:
        return side_by_side({"network": self})


def side_by_side(profiles: Mapping[str, Profile]) -> str:
    """The profiles as a table, one column each, and how they compare with the first."""
    first = next(iter(profiles.values()))
    rows = [
        ("latency, ms", *(f"{p.latency:.4g}" for p in profiles.values())),
        ("middle half, ms", *(f"{p.spread[0]:.4g} to {p.spread[1]:.4g}" for p in profiles.values())),
        ("times as fast", *(f"{first.latency / p.latency:.2f}" for p in profiles.values())),
        ("multiply-adds", *(amount(p.flops / 2) for p in profiles.values())),
        ("parameters", *(amount(p.parameters) for p in profiles.values())),
        ("peak memory, MB", *(_memory(p) for p in profiles.values())),
        ("convolutions", *(str(p.depth) for p in profiles.values())),
    ]
    lines = [f"environment: {first.environment}", *text_table(("", *profiles), rows)]
    for name, profile in profiles.items():
        if profile.memory is None and profile.memory_reason:
            lines.append(f"peak memory of {name} not measured: {profile.memory_reason}")
    return "\n".join(lines)


def _memory(profile: Profile) -> str:
    return "not measured" if profile.memory is None else f"{profile.memory / 1e6:.4g}"
