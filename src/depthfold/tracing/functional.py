"""Functions of torch.nn.functional as modules, so that a layer is a layer however the forward writes it.

F.conv2d(x, self.weight, self.bias) and F.batch_norm(x, self.running_mean, ...) become modules without parameters,
which take the tensors as further arguments: the parameters stay where the user has them, under their names. Dropouts
and batch norms follow train() and eval() again, which tracing has frozen.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Collection, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from depthfold.algebra import NormStatistics
from depthfold.tracing.modules import norm_statistics

_DROPOUTS: dict[Any, Any] = {
    F.dropout: nn.Dropout,
    F.dropout1d: nn.Dropout1d,
    F.dropout2d: nn.Dropout2d,
    F.dropout3d: nn.Dropout3d,
    F.alpha_dropout: nn.AlphaDropout,
    F.feature_alpha_dropout: nn.FeatureAlphaDropout,
}
_CONVOLUTIONS: dict[Any, int] = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}
_CONV_FUNCTIONS: dict[int, Any] = {dims: function for function, dims in _CONVOLUTIONS.items()}
_PLAIN: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
# Functions of C++ have no signature that can be read.
_CONV_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


# The name that the user knows, on the node of a function that became a module.
WHERE = "depthfold.where"


class FunctionalConv(nn.Module):
    """A convolution whose weight and bias are arguments. It has the settings of nn.Conv2d under the same names."""

    padding_mode = "zeros"

    def __init__(self, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> None:
        super().__init__()
        self.dims = weight.dim() - 2
        self.out_channels, self.in_channels = weight.shape[0], weight.shape[1] * groups
        self.kernel_size = tuple(weight.shape[2:])
        self.stride, self.dilation = (self._each(setting) for setting in (stride, dilation))
        self.padding = padding if isinstance(padding, str) else self._each(padding)
        self.groups = groups

    def _each(self, setting: Any) -> tuple[int, ...]:
        given = (setting,) if isinstance(setting, int) else tuple(setting)
        return given * self.dims if len(given) == 1 else given

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        function = _CONV_FUNCTIONS[self.dims]
        return function(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"


class FunctionalNorm(nn.Module):
    """A batch norm whose tensors are arguments. `follows` says that it uses the batch's statistics in training."""

    def __init__(self, momentum: float, eps: float, follows: bool) -> None:
        super().__init__()
        self.momentum, self.eps, self.follows = momentum, eps, follows

    def forward(
        self, x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        batch = self.training and self.follows
        return F.batch_norm(x, mean, variance, weight, bias, batch, self.momentum, self.eps)

    def extra_repr(self) -> str:
        return f"momentum={self.momentum}, eps={self.eps}, follows={self.follows}"


def functions_as_modules(graph: fx.GraphModule, follows: Mapping[str, bool]) -> None:
    """Replace the functions by modules. `follows` says of each batch norm, by the path of its running mean, whether it
    uses the statistics of the batch in training."""
    for node in list(graph.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _DROPOUTS:
            made = _dropout(node)
        elif node.target in _CONVOLUTIONS:
            made = _convolution(graph, node)
        elif node.target is F.batch_norm:
            made = _batch_norm(graph, node, follows)
        else:
            continue
        if made is not None:
            _call_instead(graph, node, *made)
    graph.graph.eliminate_dead_code(is_impure_node=lambda node: node.op != "get_attr")
    graph.recompile()


def _call_instead(graph: fx.GraphModule, node: fx.Node, module: nn.Module, args: tuple[Any, ...]) -> None:
    target = f"depthfold_{node.name}"
    graph.add_module(target, module.eval())
    with graph.graph.inserting_before(node):
        call = graph.graph.call_module(target, args)
    call.meta = dict(node.meta)
    if len(args) > 1:
        call.meta[WHERE] = _where(args[1])
    node.replace_all_uses_with(call)
    graph.graph.erase_node(node)


def _where(kept: fx.Node) -> str:
    """Return the name of a layer whose weights a module keeps: the module's own, if the tensor has the usual name."""
    owner, _, name = str(kept.target).rpartition(".")
    return owner if owner and name in ("weight", "running_mean") else str(kept.target)


Made = tuple[nn.Module, tuple[Any, ...]]  # a module and the arguments that it is called with


def _dropout(node: fx.Node) -> Made | None:
    """F.dropout(x, training=self.training). We trace in evaluation mode, so a dropout that is on has nothing to do with
    the mode: it stays as it is."""
    given = _arguments(node)
    if given["training"] is not False:
        return None
    return _DROPOUTS[node.target](given["p"]), (given["input"],)


def _convolution(graph: fx.GraphModule, node: fx.Node) -> Made | None:
    given = dict(zip(_CONV_ARGUMENTS, node.args, strict=False)) | dict(node.kwargs)
    weight, bias = given["weight"], given.get("bias")
    defaults: dict[str, Any] = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    settings: dict[str, Any] = {name: given.get(name, default) for name, default in defaults.items()}
    computed = any(isinstance(leaf, fx.Node) for leaf in tree_leaves(settings))
    if computed or not _are_kept(graph, weight, bias):
        return None
    kept = tensor_at(graph, weight)
    if kept.dim() != _CONVOLUTIONS[node.target] + 2 or not kept.is_floating_point():
        return None
    arguments = (given["input"], weight) if bias is None else (given["input"], weight, bias)
    return FunctionalConv(kept, **settings), arguments


def _batch_norm(graph: fx.GraphModule, node: fx.Node, follows: Mapping[str, bool]) -> Made | None:
    given = _arguments(node)
    mean, variance, weight, bias = (given[name] for name in ("running_mean", "running_var", "weight", "bias"))
    settings = (given["momentum"], given["eps"])
    if given["training"] is not False or mean is None or variance is None:
        return None
    if any(isinstance(setting, fx.Node) for setting in settings) or not _are_kept(graph, mean, variance, weight, bias):
        return None
    module = FunctionalNorm(*settings, follows=follows.get(str(mean.target), False))
    arguments: tuple[Any, ...] = (given["input"], mean, variance, weight, bias)
    while arguments[-1] is None:
        arguments = arguments[:-1]
    return module, arguments


def batch_norms(graph: fx.Graph) -> dict[str, bool]:
    """Return the functional batch norms by the path of their running mean, and whether each uses the batch."""
    found = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is F.batch_norm:
            given = _arguments(node)
            if isinstance(given["running_mean"], fx.Node):
                found[str(given["running_mean"].target)] = given["training"] is True
    return found


def _arguments(node: fx.Node) -> dict[str, Any]:
    assert callable(node.target)
    given = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    given.apply_defaults()
    return given.arguments


def _are_kept(graph: fx.GraphModule, *operands: Any) -> bool:
    """Return whether these are tensors that a module keeps, not ones that the forward computes."""
    return all(
        operand is None or (isinstance(operand, fx.Node) and operand.op == "get_attr" and _is_kept(graph, operand))
        for operand in operands
    )


def _is_kept(graph: fx.GraphModule, node: fx.Node) -> bool:
    tensor = tensor_at(graph, node)
    owner, _, name = str(node.target).rpartition(".")
    return isinstance(tensor, nn.Parameter) or name in graph.get_submodule(owner)._buffers


def tensor_at(graph: fx.GraphModule, node: Any) -> Tensor:
    """Return the tensor that a get_attr node reads."""
    return operator.attrgetter(str(node.target))(graph)  # type: ignore[no-any-return]


def conv_tensors(graph: fx.GraphModule, node: fx.Node) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of the convolution that a node calls."""
    module: Any = graph.get_submodule(str(node.target))
    if not isinstance(module, FunctionalConv):
        return module.weight, module.bias
    tensors = [tensor_at(graph, operand) for operand in node.args[1:]]
    return tensors[0], tensors[1] if len(tensors) > 1 else None


def norm_statistics_at(graph: fx.GraphModule, node: fx.Node) -> NormStatistics:
    """Return what the batch norm that a node calls knows."""
    module: Any = graph.get_submodule(str(node.target))
    if not isinstance(module, FunctionalNorm):
        return norm_statistics(module)
    tensors = [None if operand is None else tensor_at(graph, operand) for operand in node.args[1:]]
    mean, variance, weight, bias = (*tensors, None, None)[:4]
    assert mean is not None and variance is not None
    return NormStatistics(mean, variance, weight, bias, module.eps)


def hold_weights(graph: fx.GraphModule, names: Collection[str] | None = None) -> None:
    """Turn functional convolutions, all or those of these names, into modules of PyTorch that hold their weights. Nodes
    keep their names.

    A module takes the place of the one that kept the weights, if nothing else reads what that one keeps. Weights that
    several convolutions share stay one parameter.
    """
    calls = [
        node
        for node in graph.graph.nodes
        if (names is None or node.name in names) and isinstance(_module(graph, node), FunctionalConv)
    ]
    made = [_plain_convolution(graph, node) for node in calls]
    for node in calls:
        node.args = node.args[:1]
    graph.graph.eliminate_dead_code(is_impure_node=lambda node: node.op != "get_attr")
    for node, module in zip(calls, made, strict=True):
        place = node.meta.get(WHERE, "")
        if _is_free(graph, place):
            node.target = place
        replace_module(graph, str(node.target), module)
    graph.recompile()


def _module(graph: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    return graph.get_submodule(str(node.target)) if node.op == "call_module" else None


def _is_free(graph: fx.GraphModule, path: str) -> bool:
    """Return whether a module can be put at this path: nobody calls what is there, or reads what it keeps."""
    if not path or path not in dict(graph.named_modules()):
        return False
    for node in graph.graph.nodes:
        target = str(node.target)
        called = node.op == "call_module" and f"{path}.".startswith(f"{target}.")  # it, or what it is inside
        if called or (node.op == "get_attr" and target.startswith(f"{path}.")):
            return False
    return True


def replace_module(graph: fx.GraphModule, path: str, module: nn.Module) -> None:
    """Put a module in the place of another one. What is inside the other stays: a convolution of detectron2 has its
    batch norm and its activation there."""
    for name, child in graph.get_submodule(path).named_children():
        module.add_module(name, child)
    graph.set_submodule(path, module)


def _plain_convolution(graph: fx.GraphModule, node: fx.Node) -> nn.Module:
    module: Any = _module(graph, node)
    weight, bias = conv_tensors(graph, node)
    plain: Any = _PLAIN[module.dims](
        module.in_channels,
        module.out_channels,
        module.kernel_size,
        stride=module.stride,
        padding=module.padding,
        dilation=module.dilation,
        groups=module.groups,
        bias=bias is not None,
        device="meta",
    )
    plain.weight = _as_parameter(weight)
    plain.bias = None if bias is None else _as_parameter(bias)
    return plain.train(module.training)  # type: ignore[no-any-return]


def _as_parameter(tensor: Tensor) -> nn.Parameter:
    """A buffer, as filters that are not trained are kept, is a parameter that is not trained."""
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)


def call_batch_norm(graph: fx.GraphModule) -> None:
    """Turn functional batch norms back into the function that they were, for evaluation."""
    for node in list(graph.graph.nodes):
        module: Any = _module(graph, node)
        if isinstance(module, FunctionalNorm):
            tensors = (*node.args, None, None)[:5]
            with graph.graph.inserting_before(node):
                args = (*tensors, False, module.momentum, module.eps)
                call = graph.graph.call_function(F.batch_norm, args)
            node.replace_all_uses_with(call)
            graph.graph.erase_node(node)
