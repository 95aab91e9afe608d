"""A network together with the model that it was traced from, and the student that a plan makes of it."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, fx, nn

from depthfold.core import ConvShape, FlaggedSpan, Network, Plan, Skip, Span
from depthfold.core.network import Space, summary
from depthfold.errors import InvalidValue
from depthfold.support.digest import digest
from depthfold.tracing.inputs import ExampleInputs
from depthfold.tracing.weights import digest_tensors, weights

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blueprint:
    """A network, the places of its parts in the graph, and the inputs of the graph. It holds no weights, so that
    students and merged networks can keep it.

    `at`, `ignore` and `example` are the arguments of trace(), so that the same model can be traced in the same way
    again. `ignore` has modules that were given by their type by their names, and `example` has the inputs of the whole
    model without their values, on the device "meta".
    """

    network: Network
    sites: tuple[LayerSite, ...]
    skip_sites: tuple[SkipSite, ...]
    inputs: ExampleInputs
    at: str | None
    ignore: tuple[str, ...]
    example: ExampleInputs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class TracedNetwork:
    """A network together with its model: a copy taken when it was traced, so that the user's model stays unchanged.

    `graph` is the traced part as an fx graph. `model` is the whole model where only the submodule `at` was traced.
    """

    blueprint: Blueprint
    graph: fx.GraphModule
    model: nn.Module | None = None

    @property
    def network(self) -> Network:
        """The network alone, without the model."""
        return self.blueprint.network

    @property
    def depth(self) -> int:
        """L, the number of layers."""
        return self.network.depth

    @property
    def vanilla(self) -> Plan:
        """The plan that changes nothing."""
        return self.network.vanilla

    def spans(self, space: Space = "paper") -> tuple[Span, ...]:
        """Return every span of a search space: the keys of the latency table."""
        return self.network.spans(space)

    def flagged_spans(self, space: Space = "paper", exclusion: bool | None = None) -> tuple[FlaggedSpan, ...]:
        """Return every flagged span of a search space: the keys of the importance table."""
        return self.network.flagged_spans(space, exclusion)

    def example_tensors(self) -> tuple[Tensor, ...]:
        """Return the inputs of the traced part in order, as runtimes take them. Raise InvalidValue if one of them is
        not a tensor."""
        given = self.blueprint.inputs.for_graph(self.graph)
        if not all(isinstance(value, Tensor) for value in given):
            raise InvalidValue(
                f"The traced part takes {', '.join(type(value).__name__ for value in given)}; latency can be measured "
                'only where it takes tensors. Trace the part that does, with at="...".'
            )
        return tuple(given)

    @property
    def weights_digest(self) -> str:
        """Sixteen hex digits of the weights of the whole model."""
        return digest_tensors(weights(self.graph if self.model is None else self.model))

    @property
    def surroundings_digest(self) -> str:
        """Sixteen hex digits of every operation of the traced part, in order, and of its arguments.

        No table has entries for what is around the layers (stem, head, pooling, barriers), but the latency of every
        whole network depends on it. The values of weights and the names of modules do not count.
        """
        numbers = {node: f"%{n}" for n, node in enumerate(self.graph.graph.nodes)}
        return digest([f"{_operation(self.graph, node)} {_arguments(node, numbers)}" for node in numbers])

    def cpu(self) -> TracedNetwork:
        """Return the same network on the CPU, as a copy if it is elsewhere. It can travel to machines without that
        device."""
        parts = (self.graph, self.model)
        if not all(part is None or _is_on_cpu(part) for part in parts):
            parts = copy.deepcopy(parts)  # in one go: what the graph shares with the rest of the model stays shared
            for part in parts:
                if part is not None:
                    part.cpu()
        inputs = self.blueprint.inputs.map(lambda tensor: tensor.cpu())
        return TracedNetwork(
            blueprint=dataclasses.replace(self.blueprint, inputs=inputs), graph=parts[0], model=parts[1]
        )

    def __str__(self) -> str:
        return str(self.network)

    def __repr__(self) -> str:
        return f"<TracedNetwork {self.network.name}: {summary(self.network)}>"


def expect_traced(network: object, verb: str) -> TracedNetwork:
    """The network, if it was traced and so has its model; the verb is the function that was called with it."""
    if isinstance(network, TracedNetwork):
        return network
    bare = isinstance(network, Network)
    found = "a Network without one" if bare else type(network).__name__
    raise InvalidValue(
        f"{verb}() takes a traced network with its model, found {found}. Trace the model with trace(model, inputs), "
        "and give what that returns."
    )


def _is_on_cpu(module: nn.Module) -> bool:
    return all(tensor.device.type == "cpu" for tensor in itertools.chain(module.parameters(), module.buffers()))


def _operation(graph: fx.GraphModule, node: fx.Node) -> str:
    if node.op == "call_module":
        module = graph.get_submodule(str(node.target))
        # What a module prints of itself may leave out what it holds.
        return f"{module} {[tuple(tensor.shape) for tensor in (*module.parameters(), *module.buffers())]}"
    if node.op == "call_function":
        return f"{getattr(node.target, '__module__', '')}.{getattr(node.target, '__qualname__', node.target)}"
    if node.op == "get_attr":
        owner, _, name = str(node.target).rpartition(".")
        value = getattr(graph.get_submodule(owner), name)
        return f"tensor {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    return node.op if node.op in ("placeholder", "output") else f"{node.op} {node.target}"


def _arguments(node: fx.Node, numbers: dict[fx.Node, str]) -> str:
    """Return the arguments as text, with other operations by their numbers."""
    return repr(fx.map_arg((node.args, node.kwargs), lambda given: numbers[given]))


@dataclass(frozen=True, slots=True, eq=False)
class Student:
    """What a rewritten network remembers: where it came from. `merge` and `verify` read it."""

    blueprint: Blueprint
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
        "them, with student = rewrite(traced, plan) and student.load_state_dict(loaded.state_dict())."
    )
    raise InvalidValue(
        f"{type(module).__name__} is no rewritten network: expected what rewrite(traced, plan) returned, or a module "
        "around it. A merged network is not rewritten any more, and wrappers (DataParallel, a compiled module) must be "
        f"taken off first.{way_out if pickled else ''}"
    )
