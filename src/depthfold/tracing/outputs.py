"""Is the value after the last layer the output of the network, or does something with weights still read it?"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

from depthfold.tracing.inputs import Inputs
from depthfold.tracing.request import modules_outside


def is_output(graph: fx.GraphModule, name: str) -> bool:
    """Whether no operation that depends on the node of this name has weights."""
    node: fx.Node = next(node for node in graph.graph.nodes if node.name == name)
    return not any(_has_weights(graph, reader) for reader in _downstream(node))


def part_is_output(model: nn.Module, at: str, inputs: Inputs) -> bool:
    """The same of what the submodule `at` returns, by a run of the whole model, whose forward may not be traceable:
    whether nothing with weights is called after it. Weights that a module around it applies itself leave no trace, so
    such a module counts if it has any. Where the rest does not run on the example inputs, nothing is known: False."""
    around = [model, *(model.get_submodule(path) for path in _prefixes(at))]
    if any(_own_weights(module) for module in around):
        return False
    outside = set(modules_outside(model, at))
    returned: list[bool] = []

    def stop(*_: Any) -> None:
        if returned:
            raise _Found

    handles = [
        module.register_forward_pre_hook(stop)
        for module in model.modules()
        if id(module) in outside and _own_weights(module)
    ]
    handles.append(model.get_submodule(at).register_forward_hook(lambda *_: returned.append(True)))
    try:
        with torch.no_grad():
            inputs.map(Tensor.clone).call(model)
    except Exception:  # noqa: BLE001 - ours, or whatever a forward of the user's raises
        return False
    finally:
        for handle in handles:
            handle.remove()
    return True


class _Found(Exception):
    """Ends the forward: what follows need not run."""


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
