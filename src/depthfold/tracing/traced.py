"""A network with its traced model, and the metadata of a student."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, fx, nn

from depthfold.core import ConvShape, Drops, FlaggedSpan, Network, Plan, Skip, Space, Span
from depthfold.core.network import summary
from depthfold.errors import InvalidValue
from depthfold.support.digest import digest
from depthfold.tracing.inputs import ExampleInputs
from depthfold.tracing.weights import digest_tensors, weights

# Key in the meta of a padding node that rewriting inserted, which merging removes.
INSERTED = "depthfold.inserted_padding"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSite:
    """The node names of one linear operation of a projection.

    It is a convolution with the padding before it, an average pool with its divisor, or neither. `affine` are the batch
    norms and constant factors after it, in order. `guards` check the size of its input.
    """

    shape: ConvShape
    pad: str | None = None
    conv: str | None = None
    pool: str | None = None
    divisor: int = 1
    affine: tuple[str, ...] = ()
    guards: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipSite:
    """The node names of a skip: the addition and the steps of its projection, which is empty for the identity.

    If several skips share an addition, it adds their sum. `sums` are the additions inside that sum that contain this
    skip, and the last of them reads `operand`.
    """

    skip: Skip
    add: str
    operand: str
    sums: tuple[str, ...] = ()
    steps: tuple[StepSite, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSite:
    """The node names of a layer.

    `affine` are the batch norms and constant factors after the convolution, in order. `linear` is the last node before
    the additions, `out` the value at the layer's position, including the activation. An activation inside a batch norm
    has the name of the norm. `batch` is the batch size of the layer's input, which may differ from that of the example
    inputs. `guards` check the size of the layer's input.
    """

    pad: str | None
    conv: str
    affine: tuple[str, ...]
    linear: str
    additions: tuple[str, ...]
    activation: str | None
    out: str
    batch: int
    guards: tuple[str, ...] = ()

    @property
    def activates_in_norm(self) -> bool:
        """True if the activation is inside a batch norm."""
        return self.activation in self.affine


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blueprint:
    """A network, the nodes of its parts, and the inputs of the graph. It holds no weights.

    `at`, `ignore` and `example` are the arguments of trace(), so that the same model can be traced again. `ignore` has
    names instead of types, and `example` has the inputs of the whole model on the device "meta".
    """

    network: Network
    sites: tuple[LayerSite, ...]
    skip_sites: tuple[SkipSite, ...]
    inputs: ExampleInputs
    at: str | None
    ignore: tuple[str, ...]
    example: ExampleInputs

    def skips_inside(self, span: Span, dropped: Drops) -> Iterator[SkipSite]:
        """Yield the skips inside a segment that are not part of a dropped branch."""
        inside = (site for site in self.skip_sites if span.contains(site.skip.span))
        return (site for site in inside if not dropped.covers(site.skip.span))

    def skip_around(self, branch: Span) -> SkipSite:
        """Return the skip of a droppable branch, which has only one."""
        return next(site for site in self.skip_sites if site.skip.span == branch)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class TracedNetwork:
    """A network together with a copy of its model.

    `graph` is the traced part as an fx graph. `model` is the whole model if only the submodule `at` was traced.
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
        """Return every flagged span of a search space: the keys of an importance table without drops."""
        return self.network.flagged_spans(space, exclusion)

    def example_tensors(self) -> tuple[Tensor, ...]:
        """Return the inputs of the traced part in order. Raise InvalidValue if one of them is not a tensor."""
        values = self.blueprint.inputs.for_graph(self.graph)
        if not all(isinstance(value, Tensor) for value in values):
            raise InvalidValue(
                f"The inputs of the traced part are {', '.join(type(value).__name__ for value in values)}, but latency "
                'can only be measured for tensors. Trace a submodule that takes only tensors, with at="...".'
            )
        return tuple(values)

    @property
    def weights_digest(self) -> str:
        """A digest of the weights of the whole model: sixteen hex digits."""
        return digest_tensors(weights(self.graph if self.model is None else self.model))

    @property
    def surroundings_digest(self) -> str:
        """A digest of all operations of the traced part, without weights and names: sixteen hex digits.

        The latency of a network also depends on operations outside its layers, for which tables have no entries.
        """
        numbers = {node: f"%{n}" for n, node in enumerate(self.graph.graph.nodes)}
        return digest([f"{_operation(self.graph, node)} {_arguments(node, numbers)}" for node in numbers])

    def cpu(self) -> TracedNetwork:
        """Return the network on the CPU, as a copy if it is on another device."""
        parts = (self.graph, self.model)
        if not all(part is None or _is_on_cpu(part) for part in parts):
            parts = copy.deepcopy(parts)  # together, so that tensors shared by the graph and the model stay shared
            for part in parts:
                if part is not None:
                    part.cpu()
        inputs = self.blueprint.inputs.map(lambda tensor: tensor.cpu())
        return TracedNetwork(
            blueprint=dataclasses.replace(self.blueprint, inputs=inputs), graph=parts[0], model=parts[1]
        )

    def __str__(self) -> str:
        return str(self.network)

    def _repr_html_(self) -> str:
        return self.network._repr_html_()

    def __repr__(self) -> str:
        return f"<TracedNetwork {self.network.name}: {summary(self.network)}>"


def require_traced(network: object, verb: str) -> TracedNetwork:
    """Return the network, or raise InvalidValue if it has no model. `verb` is the name of the calling function."""
    if isinstance(network, TracedNetwork):
        return network
    found = "a Network without a model" if isinstance(network, Network) else type(network).__name__
    raise InvalidValue(f"{verb}() takes a TracedNetwork, found {found}. Pass the result of trace(model, inputs).")


def _is_on_cpu(module: nn.Module) -> bool:
    return all(tensor.device.type == "cpu" for tensor in itertools.chain(module.parameters(), module.buffers()))


def _operation(graph: fx.GraphModule, node: fx.Node) -> str:
    if node.op == "call_module":
        module = graph.get_submodule(str(node.target))
        # The repr of a module may not show its tensors.
        return f"{module} {[tuple(tensor.shape) for tensor in (*module.parameters(), *module.buffers())]}"
    if node.op == "call_function":
        return f"{getattr(node.target, '__module__', '')}.{getattr(node.target, '__qualname__', node.target)}"
    if node.op == "get_attr":
        path, _, name = str(node.target).rpartition(".")
        value = getattr(graph.get_submodule(path), name)
        return f"tensor {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    return node.op if node.op in ("placeholder", "output") else f"{node.op} {node.target}"


def _arguments(node: fx.Node, numbers: dict[fx.Node, str]) -> str:
    """Return the arguments as text, with the numbers of other operations instead of their names."""
    return repr(fx.map_arg((node.args, node.kwargs), lambda operand: numbers[operand]))


@dataclass(frozen=True, slots=True, eq=False)
class Student:
    """The metadata of a rewritten network, which merge() and verify() read."""

    blueprint: Blueprint
    plan: Plan

    KEY: ClassVar[str] = "depthfold.student"

    def __deepcopy__(self, _: object) -> Student:
        return self  # it never changes, and copying it would take longer than copying a network


def student_parts(module: nn.Module) -> tuple[fx.GraphModule, Student, str]:
    """Return the rewritten graph inside a module, its metadata, and its path ("" for the module itself)."""
    parts = dict(module.named_modules()) if isinstance(module, nn.Module) else {}
    for path, part in parts.items():
        if isinstance(part, fx.GraphModule) and Student.KEY in part.meta:
            if "_orig_mod" in path.split("."):
                raise InvalidValue(
                    "The student is wrapped by torch.compile(), so it cannot be replaced. Pass the student that was "
                    "compiled (compiled._orig_mod): both have the same weights."
                )
            return part, part.meta[Student.KEY], path
    name = type(module).__name__
    # torch.fx pickles the code of a graph without its metadata.
    if any(isinstance(part, fx.GraphModule) and not part.meta for part in parts.values()):
        raise InvalidValue(
            f"{name} has no plan: torch.save() of a whole module does not save it. Create the student again with "
            "rewrite(traced, plan), and load the weights with student.load_state_dict(loaded.state_dict())."
        )
    raise InvalidValue(
        f"{name} is not a rewritten network, nor a module around one. Pass the result of rewrite(traced, plan), not a "
        "merged or compiled network, without wrappers such as DataParallel."
    )
