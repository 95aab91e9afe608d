"""Replace activations that a forward writes as a formula, such as x * sigmoid(x), by the function of PyTorch.

A formula is recognised by its values, so it may be written in any way.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from depthfold.tracing.in_place import EXTERNAL, Observed, out_of_place
from depthfold.tracing.modules import ACTIVATIONS, called_module, is_plain
from depthfold.tracing.roles import activation_function

_KNOWN = (
    F.relu, F.relu6, F.silu, F.hardswish, F.hardsigmoid, F.mish, F.gelu, F.sigmoid, F.tanh, F.elu, F.selu, F.softplus,
    F.softsign, F.logsigmoid, F.tanhshrink,
)  # fmt: skip
_OPERATORS: tuple[Any, ...] = (operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.pow)
_NAMES = (
    "abs", "add", "clamp", "clamp_max", "clamp_min", "clip", "div", "erf", "exp", "log", "log1p", "maximum", "minimum",
    "mul", "neg", "pow", "relu", "rsub", "sigmoid", "sqrt", "square", "sub", "tanh", "true_divide",
)  # fmt: skip
_FUNCTIONS: frozenset[Any] = frozenset({
    *_KNOWN, *_OPERATORS, F.hardtanh, F.leaky_relu, F.threshold, *(getattr(torch, name) for name in _NAMES)
})  # fmt: skip
_METHODS = frozenset(_NAMES) - {"rsub"}
_RANDOM_OR_TRAINED = (nn.RReLU, nn.PReLU)
_LONGEST = 12  # operations in a formula

# Dense where activations bend; the last values show what they tend to.
_POINTS = torch.cat([torch.linspace(-12, 12, 2401, dtype=torch.float64), torch.tensor([-90.0, -30.0, 30.0, 90.0])])


def replace_formulas(graph: fx.GraphModule, run: Observed, overwritten: Collection[fx.Node]) -> bool:
    """Replace all formulas of floating-point values, and return whether there were any.

    A formula may write to the value that it reads, unless that is `overwritten`, or outside the graph. `run` is one of
    the graph.
    """
    external = {storage for node in graph.graph.nodes if node.op in EXTERNAL for storage in run.storages.get(node, ())}
    order = {node: n for n, node in enumerate(graph.graph.nodes)}
    replaced: set[fx.Node] = set()
    for node in reversed(order):  # what is inside a formula comes before its last operation
        if node in replaced or not _is_element_wise(graph, node):
            continue
        for start, inside in _formulas(graph, node, order):
            if start not in run.memory or not run.memory[start].dtype.is_floating_point:
                continue
            may_write = not (external & run.storages[start] or start in overwritten or node in overwritten)
            if (function := _function(graph, start, inside, may_write)) is not None:
                _replace(graph, start, inside, function)
                replaced.update(inside)
                break
    graph.recompile()
    return bool(replaced)


def _replace(graph: fx.GraphModule, start: fx.Node, inside: list[fx.Node], function: Any) -> None:
    end = inside[0]
    with graph.graph.inserting_before(end):
        # Recorded with all arguments, as unpickling does.
        call = function(fx.Proxy(start, fx.proxy.GraphAppendingTracer(graph.graph))).node
    call.meta = dict(end.meta)
    end.replace_all_uses_with(call)
    for node in inside:
        graph.graph.erase_node(node)


def _formulas(
    graph: fx.GraphModule, end: fx.Node, order: Mapping[fx.Node, int]
) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """Yield the values of which `end` is a function, nearest first, and the operations in between, last one first."""
    inside, reads = [end], set(end.all_input_nodes)
    while reads and len(inside) <= _LONGEST:
        latest = max(reads, key=order.__getitem__)
        if len(reads) == 1:
            yield latest, inside
        if not (_is_element_wise(graph, latest) and latest.users.keys() <= set(inside)):
            return
        inside = [*inside, latest]
        reads = (reads - {latest}) | set(latest.all_input_nodes)


def _is_element_wise(graph: fx.GraphModule, node: fx.Node) -> bool:
    """Return True for an operation on single elements without parameters."""
    module = called_module(graph, node)
    if module is not None:
        known = type(module) in ACTIVATIONS and not isinstance(module, _RANDOM_OR_TRAINED)
        return known and is_plain(module) and len(node.all_input_nodes) == 1
    if node.op == "call_method":
        return str(node.target).rstrip("_") in _METHODS
    return node.op == "call_function" and out_of_place(node.target) in _FUNCTIONS


def _function(graph: fx.GraphModule, start: fx.Node, inside: list[fx.Node], may_write: bool) -> Any:
    """Return the function of PyTorch that has the values of these operations, or None."""
    if len(inside) == 1 and (inside[0].op == "call_module" or activation_function(inside[0])):
        return None  # it is one already
    points = _POINTS.clone()
    try:
        values = _values(graph, start, inside, points)
    except Exception:  # noqa: BLE001 - an operation may not accept float64, or these values
        return None
    if not isinstance(values, Tensor) or not (may_write or torch.equal(points, _POINTS)):
        return None
    return next((function for function in _KNOWN if _same(function(_POINTS), values)), None)


def _values(graph: fx.GraphModule, start: fx.Node, inside: list[fx.Node], points: Tensor) -> Any:
    found: dict[fx.Node, Any] = {start: points}
    for node in reversed(inside):
        args: Any = fx.map_arg(node.args, found.__getitem__)
        kwargs: Any = fx.map_arg(node.kwargs, found.__getitem__)
        function: Any = called_module(graph, node) or node.target
        if node.op == "call_method":
            function = getattr(Tensor, str(node.target))
        found[node] = function(*args, **kwargs)
    return found[inside[0]]


def _same(one: Tensor, two: Tensor) -> bool:
    return one.shape == two.shape and torch.allclose(one, two, rtol=1e-9, atol=1e-12)
