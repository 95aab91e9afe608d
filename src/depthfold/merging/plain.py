"""Only layers of PyTorch are left: a shallow network loads where neither depthfold nor the model's library is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx, nn

from depthfold.tracing.modules import (
    activation_kind,
    computes_batch_norm,
    fused_activation,
    is_batch_norm,
    is_plain,
    norm_statistics,
)

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
    for node, module in _foreign(graph):
        if is_batch_norm(module) and computes_batch_norm(module) and hasattr(module, "running_var"):
            _split_norm(graph, node, module)
    for node, module in _foreign(graph):
        kind = activation_kind(module)
        if kind in _SAME:
            graph.set_submodule(str(node.target), _SAME[kind]().eval())


def _foreign(graph: fx.GraphModule) -> Iterator[tuple[fx.Node, nn.Module]]:
    for node in list(graph.graph.nodes):
        if node.op == "call_module":
            module = graph.get_submodule(str(node.target))
            if not type(module).__module__.startswith("torch.") and is_plain(module):
                yield node, module


def _split_norm(graph: fx.GraphModule, node: fx.Node, module: nn.Module) -> None:
    path, activation = str(node.target), fused_activation(module)
    graph.set_submodule(path, _batch_norm(module))
    if activation is not None:
        graph.set_submodule(f"{path}_act", activation)
        with graph.graph.inserting_after(node):
            after = graph.graph.call_module(f"{path}_act", (node,))
        node.replace_all_uses_with(after, delete_user_cb=lambda user: user is not after)


def _batch_norm(module: nn.Module) -> nn.Module:
    """The same batch norm, as PyTorch's own class. It lies outside the segments, and sees two-dimensional maps."""
    known = norm_statistics(module)
    plain = nn.BatchNorm2d(len(known.mean), eps=known.eps, affine=known.weight is not None)
    plain.running_mean, plain.running_var = known.mean.detach().clone(), known.variance.detach().clone()
    if known.weight is not None and known.bias is not None:
        plain.weight, plain.bias = _parameter(known.weight), _parameter(known.bias)
    return plain.eval()


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach().clone())
