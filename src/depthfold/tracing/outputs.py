"""Is the value after the last layer the output of the network, or does something with weights still read it?"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from depthfold.tracing.inputs import ExampleInputs
from depthfold.tracing.request import modules_outside


def is_output(graph: fx.GraphModule, name: str) -> bool:
    """Whether no operation that depends on the node of this name has weights."""
    node: fx.Node = next(node for node in graph.graph.nodes if node.name == name)
    return not any(_has_weights(graph, reader) for reader in _downstream(node))


def part_is_output(model: nn.Module, at: str, inputs: ExampleInputs) -> bool:
    """The same of what the submodule `at` returns, by two runs of the whole model, whose forward may not be traceable:
    in the second the part returns something else, and no module with weights must hear of it. Weights that a module
    around the part applies itself leave no trace, so such a module counts if it has any. Where the rest does not run on
    the example inputs, nothing is known: False."""
    around = [model, *(model.get_submodule(path) for path in _prefixes(at))]
    if any(_own_weights(module) for module in around):
        return False
    outside = set(modules_outside(model, at))
    readers = [module for module in model.modules() if id(module) in outside and _own_weights(module)]
    try:
        return _heard(model, at, inputs, readers, shift=0.0) == _heard(model, at, inputs, readers, shift=1.0)
    except Exception:  # noqa: BLE001 - whatever a forward of the user's raises
        return False


def _heard(model: nn.Module, at: str, inputs: ExampleInputs, readers: list[nn.Module], shift: float) -> list[float]:
    """What the readers receive, each tensor as one number, when what the part returns is shifted at random."""
    heard: list[float] = []

    def listen(_: nn.Module, args: Any, named: Any) -> None:
        tensors = (leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor))
        heard.extend(float(tensor.double().abs().sum()) for tensor in tensors)

    def shifted(leaf: Any) -> Any:
        if not (isinstance(leaf, Tensor) and leaf.is_floating_point()):
            return leaf
        noise = torch.rand(leaf.shape, generator=torch.Generator().manual_seed(0))
        return leaf + shift * noise.to(leaf)

    handles = [module.register_forward_pre_hook(listen, with_kwargs=True) for module in readers]
    part = model.get_submodule(at)
    handles.append(part.register_forward_hook(lambda _module, _args, output: tree_map(shifted, output)))
    try:
        with torch.no_grad():
            inputs.map(Tensor.clone).call(model)
    finally:
        for handle in handles:
            handle.remove()
    return heard


def _prefixes(path: str) -> Iterator[str]:
    """The paths of the modules around the one at `path`, but for the whole model."""
    names = path.split(".")
    return (".".join(names[:n]) for n in range(1, len(names)))


def _downstream(node: fx.Node) -> set[fx.Node]:
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
    """Whether the value is a parameter, or computed from parameters alone."""
    if node.op == "get_attr":
        return isinstance(operator.attrgetter(str(node.target))(graph), nn.Parameter)
    computed = node.op in ("call_function", "call_method") and node.all_input_nodes
    return bool(computed) and all(_is_weight(graph, operand) for operand in node.all_input_nodes)


def _own_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))
