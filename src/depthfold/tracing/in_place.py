"""Find operations that write to their input in place, and let later nodes read the written value.

A tensor may be known under several names. If each name that is read later refers to the whole tensor, its readers can
read the result of the operation, and the operation need not write in place. If one of them refers to a part of it (a
slice or a view), the operation stays in place and no layer uses the value.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from depthfold.tracing.inputs import ExampleInputs
from depthfold.tracing.interpreter import Interpreter
from depthfold.tracing.modules import activation_kind, called_module, is_no_op
from depthfold.tracing.proxies import AUGMENTED
from depthfold.tracing.random_numbers import generators
from depthfold.tracing.weights import device_of

_OPERATORS = {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.setitem}
_NAMESPACES = (torch.nn.functional, torch)
EXTERNAL = ("placeholder", "get_attr")  # values that code outside the graph can also read


def writes_in_place(node: fx.Node, module: nn.Module | None) -> bool:
    """Return True if the name of the node's operation says that it writes to its input."""
    if module is not None:
        return bool(getattr(module, "inplace", False))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    return in_place or node.target in _OPERATORS or bool(node.kwargs.get("inplace")) or "out" in node.kwargs


def out_of_place(function: Any) -> Any:
    """Return F.relu for F.relu_ and torch.add for torch.add_. Return other functions unchanged."""
    name = getattr(function, "__name__", "")
    if not name.endswith("_"):
        return function
    return next((getattr(space, name[:-1]) for space in _NAMESPACES if hasattr(space, name[:-1])), function)


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a value. Nodes with equal memory are names of one tensor; a shared storage means parts of it."""

    storage: int
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Memory:
        storage = tensor.untyped_storage()._cdata
        return cls(storage, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.dtype)


@dataclass(slots=True)
class Observed:
    """The results of one run on the example inputs: sizes, memory, the storages that each node writes to, and the nodes
    that draw random numbers."""

    sizes: dict[fx.Node, torch.Size] = field(default_factory=dict)
    memory: dict[fx.Node, Memory] = field(default_factory=dict)
    storages: dict[fx.Node, set[int]] = field(default_factory=dict)
    writes: dict[fx.Node, set[int]] = field(default_factory=dict)
    random: set[fx.Node] = field(default_factory=set)


class _Observer(Interpreter):
    """Run a graph and collect an Observed."""

    def __init__(self, graph: fx.GraphModule, modules: nn.Module) -> None:
        super().__init__(modules, graph=graph.graph)
        self.observed = Observed()
        self.generators = tuple(generators((device_of(modules),)))

    def run_node(self, n: fx.Node) -> Any:
        operands = [leaf for leaf in tree_leaves([self.env.get(arg) for arg in n.all_input_nodes]) if _is_dense(leaf)]
        before = [tensor._version for tensor in operands]
        states = [generator.get_state() for generator in self.generators]
        value = super().run_node(n)
        if not all(map(torch.equal, states, [generator.get_state() for generator in self.generators])):
            self.observed.random.add(n)
        written = [tensor for tensor, version in zip(operands, before, strict=True) if tensor._version != version]
        if written:
            self.observed.writes[n] = {tensor.untyped_storage()._cdata for tensor in written}
        if isinstance(value, Tensor):
            self.observed.sizes[n] = value.shape
            if _is_dense(value):
                self.observed.memory[n] = Memory.of(value)
        tensors = (leaf for leaf in tree_leaves(value) if _is_dense(leaf))
        self.observed.storages[n] = {tensor.untyped_storage()._cdata for tensor in tensors}
        return value


def _is_dense(leaf: Any) -> bool:
    """Return True if this is a tensor with a strided storage."""
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided


def observe(graph: fx.GraphModule, modules: nn.Module, inputs: ExampleInputs) -> Observed:
    """Run the graph once with the given modules, which the run may change."""
    interpreter = _Observer(graph, modules)
    with torch.no_grad():
        interpreter.run(*inputs.map(Tensor.clone).for_graph(graph))
    return interpreter.observed


def redirect_reads(graph: fx.GraphModule, run: Observed) -> frozenset[fx.Node]:
    """Let every node read the result of the last in-place operation before it.

    Return the overwritten values that are still read, in whole or in part, and cannot be redirected.
    """
    order = {node: n for n, node in enumerate(graph.graph.nodes)}
    external = {storage for node in order if node.op in EXTERNAL for storage in run.storages.get(node, ())}
    tensors = {node: _tensor(graph, node, run) for node in order}  # before readers are redirected
    overwritten: set[fx.Node] = set()
    for node, storage in [(writer, storage) for writer in order for storage in run.writes.get(writer, ())]:
        names = [name for name in order if order[name] < order[node] and storage in run.storages[name]]
        later = {name: {reader for reader in name.users if order[reader] > order[node]} for name in names}
        read = [name for name in names if later[name]]
        if any(tensors[name] is not tensors[node] for name in (*read, node.all_input_nodes[0])):
            overwritten.update((*names, node) if read else ())
            continue
        for name in read:
            name.replace_all_uses_with(node, delete_user_cb=lambda reader, readers=later[name]: reader in readers)
        if AUGMENTED in node.meta and storage not in external:
            node.op, node.target = "call_function", node.meta[AUGMENTED]
    graph.recompile()
    return frozenset(overwritten)


def _tensor(graph: fx.GraphModule, node: fx.Node, run: Observed) -> fx.Node:
    """Return the node that created the tensor of this node.

    Only operations that return their input at every size count: a slice may be the whole value at the traced size only.
    """
    while node.all_input_nodes and run.memory.get(node) == run.memory.get(node.all_input_nodes[0]) is not None:
        module = called_module(graph, node)
        known = module is None or is_no_op(module) or activation_kind(module) is not None
        writes = node in run.writes or node.target == "detach" or (module is not None and is_no_op(module))
        if not (known and writes):
            break
        node = node.all_input_nodes[0]
    return node


def writes_to_weights(graph: fx.GraphModule, run: Observed) -> tuple[fx.Node, str] | None:
    """Return the first node that writes to a tensor stored on a module, and the name of that tensor."""
    stored = {
        storage: str(node.target)
        for node in graph.graph.nodes
        if node.op == "get_attr"
        for storage in run.storages.get(node, ())
    }
    found = ((node, stored[each]) for node, storages in run.writes.items() for each in storages if each in stored)
    return next(found, None)
