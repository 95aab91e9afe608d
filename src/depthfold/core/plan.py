"""The plan: which activations stay and where the network is not merged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from depthfold.core.span import Position
from depthfold.errors import PlanError
from depthfold.support.document import Document


@dataclass(frozen=True, slots=True)
class Plan(Document):
    """A and S of the paper: `activations` are the positions where an activation stands, `cuts` where no merging
    crosses. Pure data: applying a plan decides nothing.

    A is a subset of S, with one exception: the last position L of the network is no cut (nothing follows it), but an
    activation can stand there.
    """

    FORMAT: ClassVar[str] = "depthfold.plan"

    activations: frozenset[Position]
    cuts: tuple[Position, ...]

    def __init__(self, activations: Iterable[Position], cuts: Iterable[Position]) -> None:
        object.__setattr__(self, "activations", frozenset(_positions("activations", activations)))
        object.__setattr__(self, "cuts", tuple(sorted(set(_positions("cuts", cuts)))))
        outside = sorted(self.activations - set(self.cuts))
        last = max(self.cuts, default=0)
        if len(outside) > 1 or (outside and outside[0] < last):
            raise PlanError(
                f"The activations {outside[:8]} are not among the cuts {list(self.cuts)[:60]}. An activation cannot "
                "be merged across, so each one (but the one at the last position L) must also be a cut: add them to "
                "cuts, or leave the activations out."
            )

    def __str__(self) -> str:
        return f"Plan: activations at {ranges(self.activations)}; cuts at {ranges(self.cuts)}"


def _positions(name: str, given: object) -> tuple[Position, ...]:
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise PlanError(
            f"A plan's {name} are several positions in a row, found {given!r:.80}. Write Plan([2], [1, 2]), say."
        )
    positions = tuple(given)
    for position in positions:
        if type(position) is not int or position < 1:
            raise PlanError(f"A plan's {name} are positions 1, 2, ..., found {position!r}.")
    return positions


def ranges(positions: Iterable[int]) -> str:
    """1-4 6 9-12: a list of positions that a person can read."""
    runs: list[list[int]] = []
    for position in sorted(positions):
        if runs and runs[-1][1] == position - 1:
            runs[-1][1] = position
        else:
            runs.append([position, position])
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "none"
