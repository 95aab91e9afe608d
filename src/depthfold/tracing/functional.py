"""Convert functions of torch.nn.functional to modules, so that functional code has layers as well.

F.conv2d(x, self.weight, self.bias) and F.batch_norm(x, self.running_mean, ...) become modules without parameters, which
take the tensors as further arguments. The parameters stay in the user's modules, under their names. Dropouts and batch
norms follow train() and eval() again, which tracing has fixed.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from depthfold.algebra import NormStatistics
from depthfold.tracing.factors import constant_factor
from depthfold.tracing.modules import called_module, norm_statistics

_DROPOUTS: dict[Any, Any] = {
    F.dropout: nn.Dropout,
    F.dropout1d: nn.Dropout1d,
    F.dropout2d: nn.Dropout2d,
    F.dropout3d: nn.Dropout3d,
    F.alpha_dropout: nn.AlphaDropout,
    F.feature_alpha_dropout: nn.FeatureAlphaDropout,
}
_CONVOLUTIONS: tuple[Any, ...] = (F.conv1d, F.conv2d, F.conv3d)
_CONV_MODULES: tuple[Any, ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# inspect cannot read the signatures of these functions, which are implemented in C++.
_CONV_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")

# Key in the meta of a node that was a function: the name of the layer in the user's model.
USER_NAME = "depthfold.user_name"


def per_dimension(setting: Any, dims: int) -> tuple[int, ...]:
    """Return a setting such as a stride as one number per dimension."""
    values = (setting,) if isinstance(setting, int) else tuple(setting)
    return values * dims if len(values) == 1 else values


class FunctionalConv(nn.Module):
    """A convolution that takes weight and bias as arguments, with the settings of nn.Conv2d as attributes."""

    padding_mode = "zeros"

    def __init__(self, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> None:
        super().__init__()
        self.dims = weight.dim() - 2
        self.out_channels, self.in_channels = weight.shape[0], weight.shape[1] * groups
        self.kernel_size = tuple(weight.shape[2:])
        self.stride, self.dilation = (per_dimension(setting, self.dims) for setting in (stride, dilation))
        self.padding = padding if isinstance(padding, str) else per_dimension(padding, self.dims)
        self.groups = groups

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        function = _CONVOLUTIONS[self.dims - 1]
        return function(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"


class FunctionalNorm(nn.Module):
    """A batch norm that takes its tensors as arguments. With `follows_mode`, it uses batch statistics in training."""

    def __init__(self, momentum: float, eps: float, follows_mode: bool) -> None:
        super().__init__()
        self.momentum, self.eps, self.follows_mode = momentum, eps, follows_mode

    def forward(
        self, x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        batch = self.training and self.follows_mode
        return F.batch_norm(x, mean, variance, weight, bias, batch, self.momentum, self.eps)

    def extra_repr(self) -> str:
        return f"momentum={self.momentum}, eps={self.eps}, follows_mode={self.follows_mode}"


def functions_as_modules(graph: fx.GraphModule, follows_mode: Mapping[str, bool]) -> None:
    """Replace functional convolutions, batch norms and dropouts by modules.

    `follows_mode` is True for batch norms, by the path of the running mean, that use batch statistics in training.
    """
    for node in list(graph.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _DROPOUTS:
            replacement = _dropout(node)
        elif node.target in _CONVOLUTIONS:
            replacement = _convolution(graph, node)
        elif node.target is F.batch_norm:
            replacement = _batch_norm(graph, node, follows_mode)
        else:
            continue
        if replacement is not None:
            _call_module(graph, node, *replacement)
    graph.graph.eliminate_dead_code(is_impure_node=lambda node: node.op != "get_attr")
    graph.recompile()


def _call_module(graph: fx.GraphModule, node: fx.Node, module: nn.Module, args: tuple[Any, ...]) -> None:
    target = f"depthfold_{node.name}"
    graph.add_module(target, module.eval())
    with graph.graph.inserting_before(node):
        call = graph.graph.call_module(target, args)
    call.meta = dict(node.meta)
    if len(args) > 1:
        call.meta[USER_NAME] = _user_name(args[1])
    node.replace_all_uses_with(call)
    graph.graph.erase_node(node)


def _user_name(tensor: fx.Node) -> str:
    """Return the name of a layer by its first tensor: the path of the module, if the tensor has its usual name."""
    path, _, name = str(tensor.target).rpartition(".")
    return path if path and name in ("weight", "running_mean") else str(tensor.target)


Replacement = tuple[nn.Module, tuple[Any, ...]]  # a module and its arguments


def _dropout(node: fx.Node) -> Replacement | None:
    """Return a dropout module. A dropout that is active although tracing runs in evaluation mode stays a function."""
    arguments = _arguments(node)
    if arguments["training"] is not False:
        return None
    return _DROPOUTS[node.target](arguments["p"]), (arguments["input"],)


def _convolution(graph: fx.GraphModule, node: fx.Node) -> Replacement | None:
    arguments = dict(zip(_CONV_ARGUMENTS, node.args, strict=False)) | dict(node.kwargs)
    weight, bias = arguments["weight"], arguments.get("bias")
    defaults: dict[str, Any] = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    settings: dict[str, Any] = {name: arguments.get(name, default) for name, default in defaults.items()}
    computed = any(isinstance(leaf, fx.Node) for leaf in tree_leaves(settings))
    if computed or not _are_stored(graph, weight, bias):
        return None
    tensor = tensor_at(graph, weight)
    if tensor.dim() != _CONVOLUTIONS.index(node.target) + 3 or not tensor.is_floating_point():
        return None
    operands = (arguments["input"], weight) if bias is None else (arguments["input"], weight, bias)
    return FunctionalConv(tensor, **settings), operands


def _batch_norm(graph: fx.GraphModule, node: fx.Node, follows_mode: Mapping[str, bool]) -> Replacement | None:
    arguments = _arguments(node)
    mean, variance, weight, bias = (arguments[name] for name in ("running_mean", "running_var", "weight", "bias"))
    settings = (arguments["momentum"], arguments["eps"])
    if arguments["training"] is not False or mean is None or variance is None:
        return None
    computed = any(isinstance(setting, fx.Node) for setting in settings)
    if computed or not _are_stored(graph, mean, variance, weight, bias):
        return None
    module = FunctionalNorm(*settings, follows_mode=follows_mode.get(str(mean.target), False))
    operands: tuple[Any, ...] = (arguments["input"], mean, variance, weight, bias)
    while operands[-1] is None:
        operands = operands[:-1]
    return module, operands


def functional_batch_norms(graph: fx.Graph) -> dict[str, bool]:
    """Return whether each functional batch norm uses batch statistics, by the path of its running mean."""
    found = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is F.batch_norm:
            arguments = _arguments(node)
            if isinstance(arguments["running_mean"], fx.Node):
                found[str(arguments["running_mean"].target)] = arguments["training"] is True
    return found


def _arguments(node: fx.Node) -> dict[str, Any]:
    assert callable(node.target)
    bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return bound.arguments


def _are_stored(graph: fx.GraphModule, *operands: Any) -> bool:
    """Return True if each operand is None or a tensor stored on a module, not one that the forward computes."""
    return all(
        operand is None or (isinstance(operand, fx.Node) and operand.op == "get_attr" and _is_stored(graph, operand))
        for operand in operands
    )


def _is_stored(graph: fx.GraphModule, node: fx.Node) -> bool:
    tensor = tensor_at(graph, node)
    path, _, name = str(node.target).rpartition(".")
    return isinstance(tensor, nn.Parameter) or name in graph.get_submodule(path)._buffers


def tensor_at(graph: fx.GraphModule, node: Any) -> Tensor:
    """Return the tensor that a get_attr node reads."""
    return operator.attrgetter(str(node.target))(graph)  # type: ignore[no-any-return]


def conv_tensors(graph: fx.GraphModule, node: fx.Node) -> tuple[Tensor, Tensor | None]:
    """Return the weight and bias of the convolution that a node calls."""
    module: Any = called_module(graph, node)
    if not isinstance(module, FunctionalConv):
        return module.weight, module.bias
    tensors = [tensor_at(graph, operand) for operand in node.args[1:]]
    return tensors[0], tensors[1] if len(tensors) > 1 else None


def norm_statistics_at(graph: fx.GraphModule, node: fx.Node) -> NormStatistics:
    """Return the statistics of the batch norm that a node calls, or of one that multiplies by the node's factor."""
    if (factor := constant_factor(node)) is not None:
        one = torch.ones(1, dtype=torch.float64)
        return NormStatistics(mean=0 * one, variance=one, weight=factor * one, bias=None, eps=0.0)
    module: Any = called_module(graph, node)
    if not isinstance(module, FunctionalNorm):
        return norm_statistics(module)
    tensors = [None if operand is None else tensor_at(graph, operand) for operand in node.args[1:]]
    mean, variance, weight, bias = (*tensors, None, None)[:4]
    assert mean is not None and variance is not None
    return NormStatistics(mean, variance, weight, bias, module.eps)


def use_plain_convolutions(graph: fx.GraphModule, names: Collection[str] | None = None) -> None:
    """Replace functional convolutions, all or those with these node names, by PyTorch modules with weights.

    A module replaces the one that stored the weights, unless something else uses that one. Weights that several
    convolutions share stay one parameter. Nodes keep their names.
    """
    calls = [
        node
        for node in graph.graph.nodes
        if (names is None or node.name in names) and isinstance(called_module(graph, node), FunctionalConv)
    ]
    convolutions = [_plain_convolution(graph, node) for node in calls]
    for node in calls:
        node.args = node.args[:1]
    graph.graph.eliminate_dead_code(is_impure_node=lambda node: node.op != "get_attr")
    for node, module in zip(calls, convolutions, strict=True):
        path = node.meta.get(USER_NAME, "")
        if _can_replace(graph, path):
            node.target = path
        replace_module(graph, str(node.target), module)
    graph.recompile()


def _can_replace(graph: fx.GraphModule, path: str) -> bool:
    """Return True if the module at this path is neither called nor read."""
    if not path or path not in dict(graph.named_modules()):
        return False
    for node in graph.graph.nodes:
        target = str(node.target)
        called = node.op == "call_module" and f"{path}.".startswith(f"{target}.")  # the module or one around it
        if called or (node.op == "get_attr" and target.startswith(f"{path}.")):
            return False
    return True


def replace_module(graph: fx.GraphModule, path: str, module: nn.Module) -> None:
    """Replace a module and keep its children, such as the batch norm and activation in a convolution of detectron2."""
    for name, child in graph.get_submodule(path).named_children():
        module.add_module(name, child)
    graph.set_submodule(path, module)


def _plain_convolution(graph: fx.GraphModule, node: fx.Node) -> nn.Module:
    module: Any = called_module(graph, node)
    weight, bias = conv_tensors(graph, node)
    plain: Any = _CONV_MODULES[module.dims - 1](
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
    """Return the tensor as a parameter. A buffer, such as a fixed filter, becomes one that is not trained."""
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)


def use_functional_batch_norms(graph: fx.GraphModule) -> None:
    """Replace functional batch norm modules by calls of F.batch_norm in evaluation mode."""
    for node in list(graph.graph.nodes):
        module: Any = called_module(graph, node)
        if isinstance(module, FunctionalNorm):
            tensors = (*node.args, None, None)[:5]
            with graph.graph.inserting_before(node):
                args = (*tensors, False, module.momentum, module.eps)
                call = graph.graph.call_function(F.batch_norm, args)
            node.replace_all_uses_with(call)
            graph.graph.erase_node(node)
