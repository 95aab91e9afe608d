"""The measured costs of a network. `depthfold.latency` measures them."""

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
    """The measured costs of a network.

    `flops` counts a multiplication and an addition as two operations, like PyTorch's counter. `memory` is the peak in
    bytes including weights, or None with a `memory_reason` if it could not be measured.
    """

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
            raise InvalidValue("A profile needs at least one sample of the latency.")

    @property
    def latency(self) -> float:
        """The median in milliseconds."""
        return median(self.samples)

    @property
    def spread(self) -> tuple[float, float]:
        """The quartiles of the samples, between which half of them lie."""
        if len(self.samples) == 1:
            return self.samples[0], self.samples[0]
        low, _, high = quantiles(self.samples, n=4, method="inclusive")
        return low, high

    def __str__(self) -> str:
        return side_by_side({"network": self})


def side_by_side(profiles: Mapping[str, Profile]) -> str:
    """Return a table with one column per profile, compared with the first one."""
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
