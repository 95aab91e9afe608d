"""A network together with the model that it was traced from, and the student that a plan makes of it."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from torch import fx, nn

from depthfold.core import ConvShape, Document, Network, Plan, Skip
from depthfold.errors import InvalidValue
from depthfold.tracing.inputs import Inputs

# Marks a padding node that rewriting put in, so that merging can look behind it.
INSERTED = "depthfold.inserted_padding"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSite:
    """Where one linear operation of a projection lives in the graph: a convolution with the padding before it, an
    average pool with the number that it divides by, or neither, and the batch norm after it. `guards` check the size of
    its input."""

    shape: ConvShape
    pad: str | None = None
    conv: str | None = None
    pool: str | None = None
    divisor: int = 1
    norm: str | None = None
    guards: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipSite:
    """Where a skip lives in the graph: the addition, and the steps of its projection, none for the identity.

    Several skips may share an addition, which adds their sum. `sums` are then the additions inside that sum which
    this skip runs through, and the last one reads `operand`.
    """

    skip: Skip
    add: str
    operand: str
    sums: tuple[str, ...] = ()
    steps: tuple[StepSite, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSite:
    """Where a layer lives in the graph: names of nodes. `linear` is the last one before the additions, `out` the
    value at the layer's position, activation included. An activation inside a batch norm has the norm's name. `batch`
    is that of the example inputs as it reached the layer: a forward may have folded another dimension into it. `guards`
    check the size of the layer's input."""

    pad: str | None
    conv: str
    norm: str | None
    linear: str
    additions: tuple[str, ...]
    activation: str | None
    out: str
    batch: int
    guards: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Blueprint(Network):
    """A Network that also knows where its parts live in the graph, and what the graph takes. As JSON it is the plain
    Network. It holds no weights, so whatever is made of a model can keep it.

    `at`, `ignore` and `example` are what trace() was asked for, so that the same model can be traced in the same way
    again: modules that were left alone by their type are there by their names, and the example inputs of the whole
    model without their values, on the device "meta".
    """

    sites: tuple[LayerSite, ...] = field(compare=False)
    skip_sites: tuple[SkipSite, ...] = field(compare=False)
    inputs: Inputs = field(compare=False)
    at: str | None = field(default=None, compare=False)
    ignore: tuple[str, ...] = field(default=(), compare=False)
    example: Inputs = field(default=Inputs(), compare=False)

    @property
    def structure(self) -> Network:
        """The network alone."""
        return _narrow(Network, self)

    @property
    def blueprint(self) -> Blueprint:
        """The network without its model."""
        return _narrow(Blueprint, self)

    def to_json(self) -> dict[str, Any]:
        return Document.to_json(self.structure)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TracedNetwork(Blueprint):
    """A Blueprint with its model: a copy taken when it was traced, so that the user's stays as it is.

    `graph` is the traced part as an fx graph, `model` the whole model where only the submodule `at` was traced.
    """

    graph: fx.GraphModule = field(compare=False)
    model: nn.Module | None = field(default=None, compare=False)

    def cpu(self) -> TracedNetwork:
        """The same network on the CPU: a copy where it is elsewhere. It can travel to machines without that device."""
        inputs, parts = self.inputs.map(lambda tensor: tensor.cpu()), (self.graph, self.model)
        if not all(part is None or _is_on_cpu(part) for part in parts):
            parts = copy.deepcopy(parts)  # in one go: what the graph shares with the rest of the model stays shared
            for part in parts:
                if part is not None:
                    part.cpu()
        return dataclasses.replace(self, graph=parts[0], model=parts[1], inputs=inputs)


def expect_traced(network: object, verb: str) -> TracedNetwork:
    """The network, if it was traced and so has its model; the verb is the function that was called with it."""
    if isinstance(network, TracedNetwork):
        return network
    bare = isinstance(network, Network)
    found = "a Network without one, as a file holds it" if bare else type(network).__name__
    raise InvalidValue(
        f"{verb}() takes a traced network with its model, found {found}. Trace the model with trace(model, inputs), "
        "and give what that returns."
    )


N = TypeVar("N", bound=Network)


def _is_on_cpu(module: nn.Module) -> bool:
    return all(tensor.device.type == "cpu" for tensor in itertools.chain(module.parameters(), module.buffers()))


def _narrow(kind: type[N], network: Network) -> N:
    """The fields of a noun that a more general one has."""
    return kind(**{each.name: getattr(network, each.name) for each in dataclasses.fields(kind)})


@dataclass(frozen=True, slots=True, eq=False)
class Student:
    """What a rewritten network remembers: where it came from. `merge` and `verify` read it."""

    network: Blueprint
    plan: Plan

    KEY: ClassVar[str] = "depthfold.student"


def student_parts(module: nn.Module) -> tuple[fx.GraphModule, Student, str]:
    """The rewritten graph inside a module, what it remembers, and its path: "" where the module itself is it."""
    parts = dict(module.named_modules()) if isinstance(module, nn.Module) else {}
    for path, part in parts.items():
        if isinstance(part, fx.GraphModule) and Student.KEY in part.meta:
            return part, part.meta[Student.KEY], path
    # torch.fx pickles a graph as its code, and what the graph remembers is not there.
    pickled = any(isinstance(part, fx.GraphModule) and not part.meta for part in parts.values())
    way_out = (
        " torch.save() of the whole module keeps its weights, but not its plan: rewrite the network once more and load "
        "them, with student = rewrite(network, plan) and student.load_state_dict(loaded.state_dict())."
    )
    raise InvalidValue(
        f"{type(module).__name__} is no rewritten network: expected what rewrite(network, plan) returned, or a module "
        "around it. A merged network is not rewritten any more, and wrappers (DataParallel, a compiled module) must be "
        f"taken off first.{way_out if pickled else ''}"
    )
