"""Only layers of PyTorch are left: a shallow network loads where neither depthfold nor the model's library is."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx, nn

from depthfold.tracing.functional import call_batch_norm
from depthfold.tracing.modules import activation_kind, fused_activation, is_plain, norm_statistics, plain_batch_norm
from depthfold.tracing.size_guard import SizeCheck, SizeGuard
from depthfold.tracing.uses import read_by_code

# Activations that timm writes anew, with the same values as PyTorch's own.
_SAME: dict[str, Any] = {
    "gelu": nn.GELU,
    "gelutanh": lambda: nn.GELU(approximate="tanh"),
    "hardsigmoid": nn.Hardsigmoid,
    "hardswish": nn.Hardswish,
    "mish": nn.Mish,
    "sigmoid": nn.Sigmoid,
    "swish": nn.SiLU,
    "tanh": nn.Tanh,
}


def use_plain_layers(graph: fx.GraphModule) -> None:
    """Batch norms and activations of other libraries as PyTorch's own. What we do not know stays as it is."""
    call_batch_norm(graph)
    for path, (module, calls) in _foreign(graph).items():
        kind = plain_batch_norm(module)
        if kind is not None and getattr(module, "running_var", None) is not None:
            _split_norm(graph, path, calls, _batch_norm(module, kind), fused_activation(module))
    for path, (module, _) in _foreign(graph).items():
        same = _SAME.get(activation_kind(module) or "")
        if same is not None:
            graph.set_submodule(path, same().eval())


def guards_as_assertions(graph: fx.GraphModule) -> set[str]:
    """Turn size guards into assertions of PyTorch. Return the names of the nodes that are gone."""
    names = set()
    for node in list(graph.graph.nodes):
        guard = graph.get_submodule(str(node.target)) if node.op == "call_module" else None
        if not isinstance(guard, SizeGuard):
            continue
        names.add(node.name)
        source = node.all_input_nodes[0]
        with graph.graph.inserting_before(node):
            for check in guard.checks:
                _assert_size(graph.graph, source, check, guard.message())
        node.replace_all_uses_with(source)
        graph.graph.erase_node(node)
    return names


def _assert_size(graph: fx.Graph, source: fx.Node, check: SizeCheck, message: str) -> None:
    size = graph.call_method("size", (source, check.dim))
    if (check.shift, check.stride) != (-1, 1):
        moved = graph.call_function(operator.add, (size, check.shift))
        size = graph.call_function(operator.add, (graph.call_function(operator.floordiv, (moved, check.stride)), 1))
    rule = check.rule
    remainder = graph.call_function(operator.mod, (size, rule.period))
    # `remainder in remainders` would be asked of a proxy when somebody traces the merged network.
    equal = [graph.call_function(operator.eq, (remainder, each)) for each in rule.remainders]
    allowed = reduce(lambda one, two: graph.call_function(operator.or_, (one, two)), equal)
    for within in ((operator.ge, rule.smallest), (operator.le, rule.largest)):
        allowed = graph.call_function(operator.and_, (allowed, graph.call_function(within[0], (size, within[1]))))
    graph.call_function(torch._assert, (allowed, message))


def _foreign(graph: fx.GraphModule) -> dict[str, tuple[nn.Module, list[fx.Node]]]:
    """The modules of other libraries by their paths, each with all its calls: whatever takes its place, does so in all
    of them. Where code reads parameters of such a module by their names, it stays."""
    read = read_by_code(graph)
    found: dict[str, tuple[nn.Module, list[fx.Node]]] = {}
    for node in graph.graph.nodes:
        if node.op == "call_module" and node.target not in read:
            module = graph.get_submodule(str(node.target))
            # What stays in training mode in evaluation keeps its class, which sees to that.
            if not type(module).__module__.startswith("torch.") and is_plain(module) and not module.training:
                found.setdefault(str(node.target), (module, []))[1].append(node)
    return found


def _split_norm(
    graph: fx.GraphModule, path: str, calls: Sequence[fx.Node], norm: nn.Module, activation: nn.Module | None
) -> None:
    graph.set_submodule(path, norm)
    if activation is None:
        return
    target, taken = f"{path}_act", {name for name, _ in graph.named_modules(remove_duplicate=False)}
    while target in taken:
        target += "_"
    graph.set_submodule(target, activation)
    for node in calls:
        _follow(graph, node, target)


def _follow(graph: fx.GraphModule, node: fx.Node, target: str) -> None:
    """Call a module on the value of this node, for all who read it."""
    with graph.graph.inserting_after(node):
        after = graph.graph.call_module(target, (node,))
    node.replace_all_uses_with(after, delete_user_cb=lambda user: user is not after)


def _batch_norm(module: nn.Module, kind: Any) -> Any:
    """The same batch norm, as a class of PyTorch's own."""
    known = norm_statistics(module)
    plain: Any = kind(len(known.mean), eps=known.eps, affine=False)
    plain.running_mean, plain.running_var = known.mean.detach().clone(), known.variance.detach().clone()
    if known.weight is not None or known.bias is not None:
        plain.affine = True
        plain.weight = _parameter(torch.ones_like(known.mean) if known.weight is None else known.weight)
        plain.bias = _parameter(torch.zeros_like(known.mean) if known.bias is None else known.bias)
    return plain.eval()


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach().clone())
