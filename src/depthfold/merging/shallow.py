"""What a merged network keeps about its origin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx, nn

from depthfold.core import Plan, Span
from depthfold.errors import InvalidValue
from depthfold.tracing import Blueprint


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
