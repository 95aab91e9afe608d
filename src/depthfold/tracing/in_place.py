"""Operations that write to their input: found by running them, and recorded as what they do.

A value that is written to has other names: those who read it later read what was written. Where all of them hold the
whole value, they can as well read what the operation returns, and then nothing needs to be written in place. Where one
of them is a part of it (a slice, a view), the operation stays as it is, and no layer relies on the value.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from depthfold.tracing.inputs import ExampleInputs
from depthfold.tracing.modules import activation_kind, is_no_operation
from depthfold.tracing.proxies import AUGMENTED

_OPERATORS = {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.setitem}
_HOMES = (torch.nn.functional, torch)
_GIVEN = ("placeholder", "get_attr")  # others see what is written to the inputs and to what modules keep


def writes_in_place(node: fx.Node, module: nn.Module | None) -> bool:
    """Return whether the node changes its input, by its name: it matters even where nobody reads its result."""
    if module is not None:
        return bool(getattr(module, "inplace", False))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    return in_place or node.target in _OPERATORS or bool(node.kwargs.get("inplace")) or "out" in node.kwargs


def out_of_place(function: Any) -> Any:
    """Return F.relu for F.relu_, torch.add for torch.add_, and any other function as it is."""
    name = getattr(function, "__name__", "")
    if not name.endswith("_"):
        return function
    return next((getattr(home, name[:-1]) for home in _HOMES if hasattr(home, name[:-1])), function)


@dataclass(frozen=True, slots=True)
class Memory:
    """Where the value of a node lies. Two nodes with the same memory are two names of one tensor; with the same storage
    alone, one of them is a part of the other or both are parts of something."""

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
class Run:
    """What one run on the example inputs shows: sizes, where values lie, and which storages each node writes to."""

    sizes: dict[fx.Node, torch.Size] = field(default_factory=dict)
    memory: dict[fx.Node, Memory] = field(default_factory=dict)
    storages: dict[fx.Node, set[int]] = field(default_factory=dict)
    writes: dict[fx.Node, set[int]] = field(default_factory=dict)


class _Watch(fx.Interpreter):
    def __init__(self, graph: fx.GraphModule, modules: nn.Module) -> None:
        super().__init__(modules, graph=graph.graph)
        self.seen = Run()

    def run_node(self, n: fx.Node) -> Any:
        operands = [leaf for leaf in tree_leaves([self.env.get(arg) for arg in n.all_input_nodes]) if _is_dense(leaf)]
        before = [tensor._version for tensor in operands]
        value = super().run_node(n)
        written = {
            tensor.untyped_storage()._cdata
            for tensor, version in zip(operands, before, strict=True)
            if tensor._version != version
        }
        if written:
            self.seen.writes[n] = written
        if isinstance(value, Tensor):
            self.seen.sizes[n] = value.shape
            if _is_dense(value):
                self.seen.memory[n] = Memory.of(value)
        tensors = (leaf for leaf in tree_leaves(value) if _is_dense(leaf))
        self.seen.storages[n] = {tensor.untyped_storage()._cdata for tensor in tensors}
        return value


def _is_dense(leaf: Any) -> bool:
    """Return whether this is a tensor with a storage of the ordinary kind."""
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided


def watch(graph: fx.GraphModule, modules: nn.Module, inputs: ExampleInputs) -> Run:
    """Run the graph once, with modules that may change."""
    interpreter = _Watch(graph, modules)
    with torch.no_grad():
        interpreter.run(*inputs.map(Tensor.clone).for_graph(graph))
    return interpreter.seen


def read_what_is_written(graph: fx.GraphModule, run: Run) -> frozenset[fx.Node]:
    """Let every node read what the last operation in place before it has written. Return the values that change while
    others can still read them through a part of theirs."""
    order = {node: n for n, node in enumerate(graph.graph.nodes)}
    given = {storage for each in order if each.op in _GIVEN for storage in run.storages.get(each, ())}
    tensors = {node: _tensor(graph, node, run) for node in order}  # before readers are moved
    changing: set[fx.Node] = set()
    for node, storage in [(writer, storage) for writer in order for storage in run.writes.get(writer, ())]:
        names = [name for name in order if order[name] < order[node] and storage in run.storages[name]]
        later = {name: {reader for reader in name.users if order[reader] > order[node]} for name in names}
        read = [name for name in names if later[name]]
        if any(tensors[name] is not tensors[node] for name in (*read, node.all_input_nodes[0])):
            changing.update((*names, node) if read else ())
            continue
        for name in read:
            name.replace_all_uses_with(node, delete_user_cb=lambda reader, readers=later[name]: reader in readers)
        if AUGMENTED in node.meta and storage not in given:
            node.op, node.target = "call_function", node.meta[AUGMENTED]
    graph.recompile()
    return frozenset(changing)


def _tensor(graph: fx.GraphModule, node: fx.Node, run: Run) -> fx.Node:
    """Return the node that made the tensor which this node gives. A slice or a contiguous copy may be the whole value
    at the traced size and not at another one: only operations that always return their input count."""
    while node.all_input_nodes and run.memory.get(node) == run.memory.get(node.all_input_nodes[0]) is not None:
        module = graph.get_submodule(str(node.target)) if node.op == "call_module" else None
        known = module is None or is_no_operation(module) or activation_kind(module) is not None
        writes = node in run.writes or node.target == "detach" or (module is not None and is_no_operation(module))
        if not (known and writes):
            break
        node = node.all_input_nodes[0]
    return node


def writes_to_weights(graph: fx.GraphModule, run: Run) -> tuple[fx.Node, str] | None:
    """Return the first node that writes to what a module keeps, and the name of that tensor."""
    kept = {
        storage: str(node.target)
        for node in graph.graph.nodes
        if node.op == "get_attr"
        for storage in run.storages.get(node, ())
    }
    return next(
        ((node, kept[each]) for node, storages in run.writes.items() for each in storages if each in kept), None
    )
