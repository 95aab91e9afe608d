"""What stands around the layers of a network: stem and head that were ignored, pooling, whatever lies at barriers.

No table has entries for it, but the latency of every whole network depends on it.
"""

from __future__ import annotations

import hashlib
from typing import Any

from torch import Tensor, fx

from depthfold.tracing.traced import TracedNetwork


def surroundings(network: TracedNetwork) -> str:
    """Sixteen hex digits of every operation of the traced part, in order, and of what it takes. The values of weights
    do not count, and names do not: a network that is renamed takes as long as before."""
    graph = network.graph
    numbers = {node: f"%{n}" for n, node in enumerate(graph.graph.nodes)}
    lines = (f"{_operation(graph, node)} {_spelled((node.args, node.kwargs), numbers)}" for node in numbers)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _operation(graph: fx.GraphModule, node: fx.Node) -> str:
    if node.op == "call_module":
        module = graph.get_submodule(str(node.target))
        # What a module prints of itself may leave out what it holds.
        return f"{module} {[tuple(tensor.shape) for tensor in (*module.parameters(), *module.buffers())]}"
    if node.op == "call_function":
        return f"{getattr(node.target, '__module__', '')}.{getattr(node.target, '__qualname__', node.target)}"
    if node.op == "get_attr":
        return f"{_shape_of(_attribute(graph, str(node.target)))}"
    return node.op if node.op in ("placeholder", "output") else f"{node.op} {node.target}"


def _attribute(graph: fx.GraphModule, target: str) -> Any:
    owner, _, name = target.rpartition(".")
    return getattr(graph.get_submodule(owner), name)


def _shape_of(value: Any) -> str:
    return f"tensor {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _spelled(value: Any, numbers: dict[fx.Node, str]) -> str:
    """Arguments with other operations by their numbers."""
    return repr(fx.map_arg(value, lambda node: numbers[node]))
