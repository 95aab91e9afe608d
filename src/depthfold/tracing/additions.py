"""Write x - y and torch.add(x, y, alpha=c) as x + c * y, so that c becomes part of the layer that computes y."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from depthfold.tracing.factors import constant_factor
from depthfold.tracing.functional import FunctionalConv, FunctionalNorm
from depthfold.tracing.modules import called_module, computes_batch_norm, computes_convolution, is_batch_norm, is_no_op
from depthfold.tracing.proxies import AUGMENTED
from depthfold.tracing.roles import changes_nothing

_ADDITIONS: tuple[Any, ...] = (torch.add, "add", "add_")
_SUBTRACTIONS: dict[Any, Any] = {
    operator.sub: operator.add,
    operator.isub: operator.iadd,
    torch.sub: torch.add,
    torch.subtract: torch.add,
    "sub": "add",
    "sub_": "add_",
}


def use_plain_additions(graph: fx.GraphModule, sizes: Mapping[fx.Node, torch.Size]) -> bool:
    """Write the additions of a scaled or negated linear value as plain ones, and return whether there were any.

    Others stay: a factor that cannot be merged would be one operation more.
    """
    changed = False
    for node in [node for node in graph.graph.nodes if node.op in ("call_function", "call_method")]:
        target = _SUBTRACTIONS.get(node.target, node.target if node.target in _ADDITIONS else None)
        arguments: dict[str, Any] = dict(zip(("input", "other"), node.args, strict=False)) | dict(node.kwargs)
        factor = arguments.pop("alpha", 1)
        if target is None or arguments.keys() != {"input", "other"} or type(factor) not in (int, float):
            continue
        one, other = arguments["input"], arguments["other"]
        factor = -factor if node.target in _SUBTRACTIONS else factor
        if factor != 1:
            if not (other in sizes and sizes[other] == sizes.get(one) and _is_linear(graph, other)):
                continue
            node.meta.pop(AUGMENTED, None)  # it is not a subtraction any more
            with graph.graph.inserting_before(node):
                product = graph.graph.call_function(operator.mul, (other, factor))
            product.meta = dict(node.meta)
            other = product
        if (target, (one, other), {}) == (node.target, node.args, node.kwargs):
            continue
        node.target, node.args, node.kwargs = target, (one, other), {}
        changed = True
    graph.recompile()
    return changed


def _is_linear(graph: fx.GraphModule, node: fx.Node) -> bool:
    """Return True if a convolution or batch norm computes this value for a single reader, with factors after it."""
    while len(node.users) == 1:
        module = called_module(graph, node)
        if module is not None and not is_no_op(module):
            functional = isinstance(module, (FunctionalConv, FunctionalNorm))
            return functional or computes_convolution(module) or (is_batch_norm(module) and computes_batch_norm(module))
        if module is None and constant_factor(node) is None and not changes_nothing(node):
            return False
        node = node.all_input_nodes[0]
    return False
