"""A network together with the model that it was traced from, and the student that a plan makes of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import fx, nn

from depthfold.core import Network, Plan, Skip
from depthfold.errors import InvalidValue
from depthfold.tracing.inputs import Inputs

# Marks a padding node that rewriting put in, so that merging can look behind it.
INSERTED = "depthfold.inserted_padding"


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipSite:
    """Where a skip lives in the graph: the addition, and the nodes of its projection, if it has one."""

    skip: Skip
    add: str
    operand: str
    pad: str | None = None
    conv: str | None = None
    norm: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSite:
    """Where a layer lives in the graph: names of nodes. `linear` is the last one before the additions, `out` the
    value at the layer's position, activation included. An activation inside a batch norm has the norm's name."""

    pad: str | None
    conv: str
    norm: str | None
    linear: str
    additions: tuple[str, ...]
    activation: str | None
    out: str


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TracedNetwork(Network):
    """A Network that also knows its model: a copy taken when it was traced, so that the user's stays as it is.

    `graph` is the traced part as an fx graph, `model` the whole model where only a submodule `at` was traced.
    As JSON it is the plain Network.
    """

    graph: fx.GraphModule = field(compare=False)
    sites: tuple[LayerSite, ...] = field(compare=False)
    skip_sites: tuple[SkipSite, ...] = field(compare=False)
    inputs: Inputs = field(compare=False)
    model: nn.Module | None = field(default=None, compare=False)
    at: str | None = field(default=None, compare=False)

    @property
    def structure(self) -> Network:
        """The network without its model."""
        return Network(**{each.name: getattr(self, each.name) for each in dataclasses.fields(Network)})

    def to_json(self) -> dict[str, Any]:
        return self.structure.to_json()


@dataclass(frozen=True, slots=True, eq=False)
class Student:
    """What a rewritten network remembers: where it came from. `merge` and `verify` read it."""

    network: TracedNetwork
    plan: Plan

    KEY: ClassVar[str] = "depthfold.student"


def student_parts(module: nn.Module) -> tuple[fx.GraphModule, Student, str]:
    """The rewritten graph inside a module, what it remembers, and its path: "" where the module itself is it."""
    for path, part in module.named_modules():
        if isinstance(part, fx.GraphModule) and Student.KEY in part.meta:
            return part, part.meta[Student.KEY], path
    raise InvalidValue(
        f"{type(module).__name__} is no rewritten network: expected what rewrite(network, plan) returned, or a module "
        "around it. Wrappers such as DataParallel and compiled modules must be taken off first."
    )
