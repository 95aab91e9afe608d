"""Decide whether the value after the last layer is an output, or whether operations with weights follow it."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from depthfold.tracing.inputs import ExampleInputs
from depthfold.tracing.request import modules_outside


def is_output(graph: fx.GraphModule, name: str) -> bool:
    """Return True if no operation that depends on the node of this name has weights."""
    node: fx.Node = next(node for node in graph.graph.nodes if node.name == name)
    return not any(_has_weights(graph, reader) for reader in _downstream(node))


def part_is_output(model: nn.Module, at: str, inputs: ExampleInputs) -> bool:
    """Return True if no weights outside the submodule `at` are applied to its outputs.

    Run the whole model twice, with different outputs of the submodule, and compare the inputs of all other modules with
    weights. Hooks do not see weights that a module around the submodule applies itself, so return False if such a
    module has weights. Also return False if the model does not run on the example inputs.
    """
    names = at.split(".")
    around = [model.get_submodule(".".join(names[:n])) for n in range(len(names))]
    if any(_own_weights(module) for module in around):
        return False
    outside = set(modules_outside(model, at))
    readers = [module for module in model.modules() if id(module) in outside and _own_weights(module)]
    try:
        return _received(model, at, inputs, readers, 0.0) == _received(model, at, inputs, readers, 1.0)
    except Exception:  # noqa: BLE001 - any error of the user's code
        return False


def _received(model: nn.Module, at: str, inputs: ExampleInputs, readers: list[nn.Module], shift: float) -> list[float]:
    """Return a checksum of each tensor that the readers receive, with scaled noise added to the part's outputs."""
    checksums: list[float] = []

    def record(_: nn.Module, args: Any, named: Any) -> None:
        tensors = (leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor))
        checksums.extend(float(tensor.double().abs().sum()) for tensor in tensors)

    def shifted(leaf: Any) -> Any:
        if not (isinstance(leaf, Tensor) and leaf.is_floating_point()):
            return leaf
        noise = torch.rand(leaf.shape, generator=torch.Generator().manual_seed(0))
        return leaf + shift * noise.to(leaf)

    handles = [module.register_forward_pre_hook(record, with_kwargs=True) for module in readers]
    part = model.get_submodule(at)
    handles.append(part.register_forward_hook(lambda _module, _args, output: tree_map(shifted, output)))
    try:
        with torch.no_grad():
            inputs.map(Tensor.clone).call(model)
    finally:
        for handle in handles:
            handle.remove()
    return checksums


def _downstream(node: fx.Node) -> set[fx.Node]:
    """Return all nodes that depend on this one."""
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        new = set(waiting.pop().users) - found
        found |= new
        waiting += new
    return found


def _has_weights(graph: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        return any(True for _ in graph.get_submodule(str(node.target)).parameters())
    return any(_is_weight(graph, operand) for operand in node.all_input_nodes)


def _is_weight(graph: fx.GraphModule, node: fx.Node) -> bool:
    """Return True if the value is a parameter, or computed only from parameters."""
    if node.op == "get_attr":
        return isinstance(operator.attrgetter(str(node.target))(graph), nn.Parameter)
    computed = node.op in ("call_function", "call_method") and node.all_input_nodes
    return bool(computed) and all(_is_weight(graph, operand) for operand in node.all_input_nodes)


def _own_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))
