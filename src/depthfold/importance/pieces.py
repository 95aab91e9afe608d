"""Pieces of networks: the layers of a block, cut out of a student, and the values of the original that they read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from depthfold.core import FlaggedSpan, Plan
from depthfold.errors import InvalidValue
from depthfold.tracing import Blueprint, TracedNetwork
from depthfold.tracing.modules import called_module, is_no_op
from depthfold.tracing.size_guard import SizeGuard
from depthfold.tracing.traced import INSERTED


class _Record(nn.Module):
    """Stores its input under a name."""

    def __init__(self, values: dict[str, Any], name: str) -> None:
        super().__init__()
        self._values, self._name = values, name

    def forward(self, value: Any) -> None:
        # A copy, because a later operation may write to the tensor.
        self._values[self._name] = value.detach().clone() if isinstance(value, Tensor) else value


class ValueRecorder:
    """The values of named nodes in the last forward of a graph. A graph can have only one recorder."""

    def __init__(self, graph: fx.GraphModule, names: Iterable[str]) -> None:
        self._values: dict[str, Any] = {}
        nodes = {node.name: node for node in graph.graph.nodes}
        for name in dict.fromkeys(names):
            target = f"depthfold_record_{name}"
            graph.add_module(target, _Record(self._values, name))
            with graph.graph.inserting_after(nodes[name]):
                graph.graph.call_module(target, (nodes[name],))
        graph.recompile()

    def take(self) -> dict[str, Any]:
        """Return the values of the last forward, and forget them. Raise InvalidValue if there was no forward."""
        if not self._values:
            raise InvalidValue(
                "The task's loss does not run the traced part of the model, so its values cannot be recorded. Use "
                'method="brief" (--method brief), or trace the part that the loss runs.'
            )
        values = dict(self._values)
        self._values.clear()
        return values


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a graph, which shares its modules, and the names of the nodes whose values are its arguments."""

    module: fx.GraphModule
    inputs: tuple[str, ...]

    def __call__(self, values: Mapping[str, Any]) -> Tensor:
        return self.module(*(values[name] for name in self.inputs))  # type: ignore[no-any-return]


def cut_out(graph: fx.GraphModule, start: str, end: fx.Node) -> Piece:
    """Return the piece of a graph that computes `end` from `start`, and from other values that do not depend on it."""
    depends = {next(node for node in graph.graph.nodes if node.name == start)}
    for node in graph.graph.nodes:
        if not depends.isdisjoint(node.all_input_nodes):
            depends.add(node)
    depends = {node for node in depends if node.name != start}
    inside: set[fx.Node] = set()
    reached = [end]
    while reached:
        node = reached.pop()
        if node not in inside and (node in depends or node.op == "get_attr"):
            inside.add(node)
            reached.extend(node.all_input_nodes)
    read = {operand for node in inside for operand in node.all_input_nodes} | {end}
    piece, copies = fx.Graph(), {}
    outside = [node for node in graph.graph.nodes if node in read and node not in inside]
    for node in outside:
        copies[node] = piece.placeholder(f"value_of_{node.name}")
    for node in graph.graph.nodes:
        if node in inside:
            copies[node] = piece.node_copy(node, copies.__getitem__)
    piece.output(copies[end])
    return Piece(fx.GraphModule(graph, piece), tuple(node.name for node in outside))


def start_of(traced: TracedNetwork, i: int) -> str:
    """Return the name of the value at position i, which the layer i+1 and the skips from i read.

    It is the same in every student in which nothing before i has changed.
    """
    sites = traced.blueprint.sites
    if i > 0 and i not in traced.network.barriers:
        return sites[i - 1].out
    graph, site = traced.graph, sites[i]
    node = next(node for node in graph.graph.nodes if node.name == site.conv).all_input_nodes[0]
    while node.name == site.pad or _passes(called_module(graph, node)):
        node = node.all_input_nodes[0]
    return str(node.name)


def _passes(module: nn.Module | None) -> bool:
    return module is not None and (isinstance(module, SizeGuard) or is_no_op(module))


def end_of(graph: fx.GraphModule, blueprint: Blueprint, plan: Plan, j: int) -> fx.Node:
    """Return the value at position j in the graph of a student, after its activation."""
    node: fx.Node = next(node for node in graph.graph.nodes if node.name == blueprint.sites[j - 1].out)
    network = blueprint.network
    if j in network.final_activations(plan) - network.activations:
        (node,) = node.users  # the inserted activation
    return node


def input_of(graph: fx.GraphModule, blueprint: Blueprint, block: FlaggedSpan) -> fx.Node:
    """Return the value that the first layer of a block convolves in the graph of a student, before its padding."""
    # A dropped branch has no nodes, but an option that drops branches drops all layers of its block (span_options), and
    # then nothing is fitted. The node of a dropped layer stays, as an identity.
    site = blueprint.sites[block.i]
    node: fx.Node = next(node for node in graph.graph.nodes if node.name == site.conv).all_input_nodes[0]
    while node.name == site.pad or node.meta.get(INSERTED):
        node = node.all_input_nodes[0]
    return node
