"""What a comparison of the two networks found, and what they remember so that they can be compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx, nn

from depthfold.core import Plan, Span
from depthfold.errors import InvalidValue
from depthfold.tracing import Blueprint

# Of the largest value, by the precision of the weights. Half precisions are compared in float32: what is left is the
# rounding of the merged weights themselves.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 5e-2}


# Every segment rounds, not only the input: the outputs may differ by so many times what one rounding does.
CHAOS = 10


@dataclass(frozen=True, slots=True)
class Seam:
    """Where a segment of the two networks can be compared: names of nodes in both. The sources are its input."""

    span: Span
    student: str
    student_source: str
    shallow: str
    shallow_source: str


@dataclass(frozen=True, slots=True, eq=False)
class Shallow:
    """What a merged network remembers of its making."""

    blueprint: Blueprint
    plan: Plan
    seams: tuple[Seam, ...]

    KEY: ClassVar[str] = "depthfold.shallow"


def shallow_parts(module: nn.Module, at: str | None = None) -> tuple[fx.GraphModule, Shallow, str]:
    """The merged graph inside a module, what it remembers, and its path: "" where the module itself is it.

    `at` is the path to look at, for models of which several parts were merged one after the other.
    """
    for path, part in module.named_modules() if isinstance(module, nn.Module) else ():
        if at in (None, path) and isinstance(part, fx.GraphModule) and Shallow.KEY in part.meta:
            return part, part.meta[Shallow.KEY], path
    raise InvalidValue(f"{type(module).__name__} is no merged network: expected what merge(student) returned.")


@dataclass(frozen=True, slots=True)
class SegmentErrors:
    """The largest error of a segment's output, as a share of its largest value, when both networks give the segment
    the same input. Border outputs saw padding."""

    span: Span
    border: float
    interior: float


@dataclass(frozen=True, slots=True)
class Verification:
    """What verify() found: errors as shares of the largest value, and the tolerance that was used.

    Segments are compared on equal inputs and must meet the tolerance. At the outputs the roundings of all segments
    come together, and a network may amplify them: where the outputs miss the tolerance, `sensitivity` is what the
    rewritten network itself makes of a change in the last digit of its input. No merging can be closer than that.
    """

    segments: tuple[SegmentErrors, ...]
    output: float
    tolerance: float
    sensitivity: float = 0.0

    @property
    def border(self) -> float:
        return max((segment.border for segment in self.segments), default=0.0)

    @property
    def interior(self) -> float:
        return max((segment.interior for segment in self.segments), default=0.0)

    @property
    def ok(self) -> bool:
        segments = max(self.border, self.interior) <= self.tolerance
        return segments and self.output <= max(self.tolerance, CHAOS * self.sensitivity)

    def __str__(self) -> str:
        text = (
            f"largest error at the borders {self.border:.1e}, in the interior {self.interior:.1e}, at the outputs "
            f"{self.output:.1e}; tolerance {self.tolerance:.0e}"
        )
        if self.sensitivity:
            text += f" (the network turns a change in the last digit of its input into {self.sensitivity:.1e} there)"
        wrong = [s for s in self.segments if not max(s.border, s.interior) <= self.tolerance]
        return text if not wrong else text + f"; first wrong segment {wrong[0].span}"
