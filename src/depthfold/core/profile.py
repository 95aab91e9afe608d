"""The measured cost of a network. `latency` does the measuring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from depthfold.core.environment import Environment
from depthfold.core.speedup import why_unreliable
from depthfold.support.document import Document
from depthfold.support.table import Table
from depthfold.support.text import amount


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile(Document):
    """The cost of a network.

    `quartiles` of the latency are in milliseconds, over `count` samples. `flops` counts a multiplication and an
    addition as two, as PyTorch's counter does; papers often print multiply-adds, which are half of it. `memory` is in
    bytes, weights included, or None with the reason why it was not measured.
    """

    FORMAT: ClassVar[str] = "depthfold.profile"

    environment: Environment
    quartiles: tuple[float, float, float]
    count: int
    flops: int
    parameters: int
    depth: int
    memory: int | None
    memory_reason: str | None = None

    @property
    def latency(self) -> float:
        """The median in milliseconds."""
        return self.quartiles[1]

    @property
    def spread(self) -> tuple[float, float]:
        """The first and the third quartile."""
        return self.quartiles[0], self.quartiles[2]

    def __str__(self) -> str:
        return side_by_side({"network": self})

    def _repr_html_(self) -> str:
        return _table({"network": self}).html()


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiles(Document):
    """The profiles of an original and of the network that was made from it, measured in the same rounds."""

    FORMAT: ClassVar[str] = "depthfold.profiles"

    before: Profile
    after: Profile


def side_by_side(profiles: Mapping[str, Profile]) -> str:
    """Return the profiles as the text of a table with one column each, compared with the first."""
    return _table(profiles).text()


def _table(profiles: Mapping[str, Profile]) -> Table:
    first = next(iter(profiles.values()))
    rows = [
        ("latency, ms", *(f"{p.latency:.4g}" for p in profiles.values())),
        ("interquartile range, ms", *(f"{p.spread[0]:.4g} to {p.spread[1]:.4g}" for p in profiles.values())),
        ("times as fast", *(f"{first.latency / p.latency:.2f}" for p in profiles.values())),
        ("multiply-adds", *(amount(p.flops / 2) for p in profiles.values())),
        ("parameters", *(amount(p.parameters) for p in profiles.values())),
        ("peak memory, MB", *(f"{p.memory / 1e6:.4g}" if p.memory else "not measured" for p in profiles.values())),
        ("convolutions", *(str(p.depth) for p in profiles.values())),
    ]
    notes = tuple(
        f"peak memory of {name} not measured: {profile.memory_reason}"
        for name, profile in profiles.items()
        if profile.memory is None and profile.memory_reason
    )
    if reason := why_unreliable({name: profile.quartiles for name, profile in profiles.items()}):
        notes = (f"unreliable: {reason}. Measure again when the machine is quiet.", *notes)
    return Table((f"environment: {first.environment}",), ("", *profiles), tuple(rows), notes)
