"""Clean-up around the merged segments: fold batch norms, remove no-ops, repeated activations and unused modules."""

from __future__ import annotations

import operator
from collections.abc import Sequence, Set
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

from depthfold.algebra import Kernel, NormStatistics, fold_norm
from depthfold.tracing.factors import constant_factor
from depthfold.tracing.functional import FunctionalNorm, norm_statistics_at, use_functional_batch_norms
from depthfold.tracing.in_place import writes_in_place
from depthfold.tracing.modules import (
    CONVOLUTIONS,
    activation_kind,
    called_module,
    computes_batch_norm,
    computes_convolution,
    fused_activation,
    is_batch_norm,
    is_no_op,
    is_plain,
    norm_statistics,
    plain_batch_norm,
)
from depthfold.tracing.roles import activation_function, count_calls, paths_read_by_code
from depthfold.tracing.shapes import module_padding, module_shape
from depthfold.tracing.size_guard import SizeCheck, SizeGuard
from depthfold.tracing.unused import erase_unused


def remove_no_ops(graph: fx.GraphModule, but: Set[str | None] = frozenset()) -> set[str]:
    """Remove dropout, drop-path and identities, which do nothing in evaluation mode, except the nodes in `but`.

    Return the names of their nodes.
    """
    names = set()
    for node in list(graph.graph.nodes):
        if node.name in but:
            continue
        module = graph.get_submodule(str(node.target)) if node.op == "call_module" else None
        no_op = module is not None and is_no_op(module) and is_plain(module)
        if no_op and not module.training:  # type: ignore[union-attr]
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.graph.erase_node(node)
            names.add(node.name)
    return names


# Applied twice, they do the same as once.
_IDEMPOTENT = ("relu", "relu6")


def remove_repeated_activations(graph: fx.GraphModule) -> set[str]:
    """Remove activations that follow the same one, as after a dropped branch. Return the names of their nodes."""
    names = set()
    for node in list(graph.graph.nodes):
        kind, written = _idempotent_kind(graph, node), _is_written_to(graph, node)
        if kind is not None and not written and _idempotent_kind(graph, node.all_input_nodes[0]) == kind:
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.graph.erase_node(node)
            names.add(node.name)
    return names


def _is_written_to(graph: fx.GraphModule, value: fx.Node) -> bool:
    return any(writes_in_place(reader, called_module(graph, reader)) for reader in value.users)


def _idempotent_kind(graph: fx.GraphModule, node: fx.Node) -> str | None:
    if node.op == "call_module":
        module = graph.get_submodule(str(node.target))
        kind = activation_kind(module) if is_plain(module) else None
    else:
        kind = activation_function(node)
    return kind if kind in _IDEMPOTENT else None


def fold_remaining_norms(graph: fx.GraphModule, except_after: Set[str]) -> None:
    """Fold batch norms and factors outside the segments (stem, head, projections) into the convolutions before them.

    Ignored modules are also folded, so that they are not slower. A batch norm that follows a merged convolution but is
    not part of its segment was ignored by the user and stays; `except_after` names the merged convolutions. Modules
    that are called elsewhere, or whose weights other code reads, keep their weights.
    """
    calls, read = count_calls(graph), paths_read_by_code(graph)
    for node in list(graph.graph.nodes):
        norm = called_module(graph, node)
        if not node.all_input_nodes or (norm is None and constant_factor(node) is None):
            continue
        before = node.all_input_nodes[0]
        if before.op != "call_module" or len(before.users) != 1 or before.target in except_after:
            continue
        conv = graph.get_submodule(str(before.target))
        if not isinstance(conv, _ConvNd):
            continue
        shared = calls[id(conv)] > 1 or calls[id(norm)] > 1 or not read.isdisjoint((before.target, str(node.target)))
        if shared or not _foldable(conv, norm):
            continue
        _fold(conv, norm_statistics_at(graph, node))
        activation = None if norm is None else fused_activation(norm)
        if activation is not None:
            graph.set_submodule(str(node.target), activation)
        else:
            node.replace_all_uses_with(before)
            graph.graph.erase_node(node)


def _foldable(conv: _ConvNd, norm: nn.Module | None) -> bool:
    if norm is None or isinstance(norm, FunctionalNorm):
        return computes_convolution(conv) and is_plain(conv) and not parametrize.is_parametrized(conv)
    if (
        not (computes_convolution(conv) and is_batch_norm(norm)) or norm.training
    ):  # some stay in training mode after eval()
        return False
    plain = all(is_plain(module) and not parametrize.is_parametrized(module) for module in (conv, norm))
    return plain and computes_batch_norm(norm) and getattr(norm, "running_mean", None) is not None


def _fold(conv: _ConvNd, norm: NormStatistics) -> None:
    like = conv.weight
    kernel = fold_norm(Kernel.of(module_shape(conv, module_padding(conv)), like, conv.bias), norm)
    conv.weight = nn.Parameter(kernel.weight.to(like.device, like.dtype))
    conv.bias = nn.Parameter(kernel.bias.to(like.device, like.dtype))


def drop_unused(graph: fx.GraphModule) -> None:
    """Remove the nodes that erase_unused() does not keep, and the modules and tensors that only they used."""
    erase_unused(graph)
    graph.graph.lint()
    graph.delete_all_unused_submodules()
    _drop_unused_tensors(graph)
    graph.recompile()


def _drop_unused_tensors(graph: fx.GraphModule) -> None:
    """Remove parameters and buffers that only functions have read, and submodules of merged convolutions."""
    read = {str(node.target) for node in graph.graph.nodes if node.op == "get_attr"}
    called = {str(node.target) for node in graph.graph.nodes if node.op == "call_module"}
    for path in called:  # a plain convolution does not call the submodules of a former wrapper
        module = graph.get_submodule(path)
        children = module._modules if type(module) in CONVOLUTIONS else {}
        for name in list(children):
            if not any(f"{other}.".startswith(f"{path}.{name}.") for other in called):
                del children[name]
    for path, module in graph.named_modules():
        inside = any(path == name or path.startswith(f"{name}.") for name in called)
        for name in [*module._parameters, *module._buffers]:
            if not inside and (f"{path}.{name}" if path else name) not in read:
                delattr(module, name)


# Activations that timm implements itself, and the equivalent modules of PyTorch.
_TORCH_ACTIVATIONS: dict[str, Any] = {
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
    """Replace batch norms and activations of other libraries with PyTorch's, so that loading needs only PyTorch.

    Unknown modules stay.
    """
    use_functional_batch_norms(graph)
    for path, (module, calls) in _modules_of_other_libraries(graph).items():
        kind = plain_batch_norm(module)
        if kind is not None and getattr(module, "running_var", None) is not None:
            _split_norm(graph, path, calls, _batch_norm(module, kind), fused_activation(module))
    for path, (module, _) in _modules_of_other_libraries(graph).items():
        plain = _TORCH_ACTIVATIONS.get(activation_kind(module) or "")
        if plain is not None:
            graph.set_submodule(path, plain().eval())


def replace_guards_with_assertions(graph: fx.GraphModule) -> set[str]:
    """Replace size guards with assertions of PyTorch. Return the names of the removed nodes."""
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
    # `remainder in remainders` would fail on a proxy when the merged network is traced again.
    equal = [graph.call_function(operator.eq, (remainder, each)) for each in rule.remainders]
    allowed = reduce(lambda one, two: graph.call_function(operator.or_, (one, two)), equal)
    for within in ((operator.ge, rule.smallest), (operator.le, rule.largest)):
        allowed = graph.call_function(operator.and_, (allowed, graph.call_function(within[0], (size, within[1]))))
    graph.call_function(torch._assert, (allowed, message))


def _modules_of_other_libraries(graph: fx.GraphModule) -> dict[str, tuple[nn.Module, list[fx.Node]]]:
    """Return the modules of other libraries by path, each with all its calls.

    Modules whose parameters are read elsewhere by name are left out, because they cannot be replaced.
    """
    read = paths_read_by_code(graph)
    found: dict[str, tuple[nn.Module, list[fx.Node]]] = {}
    for node in graph.graph.nodes:
        if node.op == "call_module" and node.target not in read:
            module = graph.get_submodule(str(node.target))
            # A module that stays in training mode after eval() must keep its class.
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
        _call_after(graph, node, target)


def _call_after(graph: fx.GraphModule, node: fx.Node, target: str) -> None:
    """Call a module on the value of this node, and pass its result to all users of the node."""
    with graph.graph.inserting_after(node):
        after = graph.graph.call_module(target, (node,))
    node.replace_all_uses_with(after, delete_user_cb=lambda user: user is not after)


def _batch_norm(module: nn.Module, kind: Any) -> Any:
    """Return an equivalent batch norm of PyTorch."""
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
