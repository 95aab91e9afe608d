"""The result of verify(), and the data that a merged network keeps about its origin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx, nn

from depthfold.core import Plan, Span
from depthfold.errors import InvalidValue
from depthfold.tracing import Blueprint

# Shares of the largest value, by the precision of the weights. Half precision is compared in float32, so that only the
# rounding of the merged weights counts.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 5e-2}

# The outputs may differ by this multiple of the effect of rounding the inputs, because every segment rounds.
SENSITIVITY_FACTOR = 10


@dataclass(frozen=True, slots=True)
class SegmentNodes:
    """The names of the nodes before and after a segment in both networks."""

    span: Span
    student: str
    student_source: str
    shallow: str
    shallow_source: str


@dataclass(frozen=True, slots=True, eq=False)
class Shallow:
    """The origin of a merged network, stored in its graph."""

    blueprint: Blueprint
    plan: Plan
    segments: tuple[SegmentNodes, ...]

    KEY: ClassVar[str] = "depthfold.shallow"

    def __deepcopy__(self, _: object) -> Shallow:
        return self  # it never changes


def shallow_parts(module: nn.Module, at: str | None = None) -> tuple[fx.GraphModule, Shallow, str]:
    """Return the merged graph inside a module, its origin, and its path ("" for the module itself).

    `at` selects one path, for models with several merged parts.
    """
    for path, part in module.named_modules() if isinstance(module, nn.Module) else ():
        if at in (None, path) and isinstance(part, fx.GraphModule) and Shallow.KEY in part.meta:
            return part, part.meta[Shallow.KEY], path
    raise InvalidValue(f"{type(module).__name__} is not a merged network. Expected the result of merge(student).")


@dataclass(frozen=True, slots=True)
class SegmentErrors:
    """The largest errors of a segment's output for equal inputs, as shares of its largest value.

    Outputs at the border depend on padding; those in the interior do not.
    """

    span: Span
    border: float
    interior: float


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of verify(): errors as shares of the largest value, and the tolerance.

    Segments are compared on equal inputs and must meet the tolerance. The network may amplify the rounding errors of
    its segments. So if the outputs exceed the tolerance, `sensitivity` is the error of the rewritten network itself
    after its inputs are changed in the last digit. No merged network can be more accurate than that.
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
        return segments and self.output <= max(self.tolerance, SENSITIVITY_FACTOR * self.sensitivity)

    def __str__(self) -> str:
        text = (
            f"largest error at the borders {self.border:.1e}, in the interior {self.interior:.1e}, at the outputs "
            f"{self.output:.1e}; tolerance {self.tolerance:.0e}"
        )
        if self.sensitivity:
            text += f" (a change in the last digit of its input changes the outputs by {self.sensitivity:.1e})"
        wrong = [s for s in self.segments if not max(s.border, s.interior) <= self.tolerance]
        return text if not wrong else text + f"; first wrong segment {wrong[0].span}"
