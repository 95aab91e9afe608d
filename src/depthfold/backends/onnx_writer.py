"""ONNX written directly from a torch.fx graph, for the vocabulary of plain CNNs.

Everything here is exact or not at all: a word, an option or a module that is not known raises UnknownWord, and the
caller takes PyTorch's exporter instead.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from depthfold.backends.base import Inputs

_OPSET, _IR = 18, 10
_IDLE = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_INPLACE = (operator.iadd, "add_", "relu_", "clamp_", "mul_")


class UnknownWord(Exception):
    """The graph holds something that is not in the vocabulary."""


def write_model(module: nn.Module, inputs: Inputs) -> Any:
    """An onnx.ModelProto of a module in evaluation mode, for inputs of exactly these sizes."""
    try:
        traced = fx.symbolic_trace(module)
    except Exception as error:  # the user's own forward may raise anything when it is traced
        raise UnknownWord(f"cannot be traced: {error}") from error
    return _Writer(traced, inputs).model()


class _Writer:
    """One pass over the graph. `names` is the ONNX value of each node; a node that does nothing shares its input's."""

    def __init__(self, traced: fx.GraphModule, inputs: Inputs) -> None:
        import onnx

        self.onnx, self.traced, self.inputs = onnx, traced, inputs
        self.nodes: list[Any] = []
        self.weights: dict[str, Any] = {}
        self.names: dict[fx.Node, str] = {}
        self.flat: set[str] = set()  # values that are known to have two dimensions
        self.views: set[str] = set()  # values that share their memory with another one
        if len({tensor.dtype for tensor in (*inputs, *traced.parameters())}) > 1:
            raise UnknownWord("mixed types")

    def model(self) -> Any:
        helper = self.onnx.helper
        kind = helper.np_dtype_to_tensor_dtype(self.inputs[0].numpy().dtype)
        rest = list(self.inputs)
        sources: list[Any] = []
        targets: list[Any] = []
        for node in self.traced.graph.nodes:
            if node.op == "placeholder":
                if not rest:
                    raise UnknownWord("an argument without an example")
                sources.append(helper.make_tensor_value_info(node.name, kind, list(rest.pop(0).shape)))
                self.names[node] = node.name
            elif node.op == "output":
                results = node.args[0] if isinstance(node.args[0], tuple | list) else (node.args[0],)
                for n, result in enumerate(results):
                    # A name of its own: an output that is also an input, or twice an output, would be no valid graph.
                    self.emit("Identity", (self.read(result),), f"output_{n}")
                    targets.append(helper.make_tensor_value_info(f"output_{n}", kind, None))
            else:
                self.names[node] = self.word(node)
        if rest:
            raise UnknownWord("more examples than arguments")
        graph = helper.make_graph(self.nodes, "depthfold", sources, targets, list(self.weights.values()))
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR)

    def word(self, node: fx.Node) -> str:
        if node.op == "call_module":
            module = self.traced.get_submodule(str(node.target))
            if module._forward_hooks or module._forward_pre_hooks:
                raise UnknownWord("a module with hooks")
            if getattr(module, "inplace", False):
                self.check_only_reader(node)
            if type(module) in _IDLE:
                return self.read(node.args[0])
            write = _MODULES.get(type(module))
            if write is None or len(node.args) != 1 or node.kwargs:
                raise UnknownWord(type(module).__name__)
            return write(self, node, module)
        write = _CALLS.get(node.target) if node.op in ("call_function", "call_method") else None
        if write is None:
            raise UnknownWord(str(node.target))
        if node.kwargs.get("inplace") or node.target in _INPLACE:
            self.check_only_reader(node)
        return write(self, node, *node.args, **{k: v for k, v in node.kwargs.items() if k != "inplace"})

    def check_only_reader(self, node: fx.Node) -> None:
        """Refuse operations in place on values that others may read: in ONNX nothing changes in place."""
        value: Any = node.args[0] if node.args else None
        if not isinstance(value, fx.Node) or len(value.users) != 1 or value.op == "placeholder":
            raise UnknownWord("an operation in place")
        if self.names[value] != value.name or value.name in self.views:
            raise UnknownWord("an operation in place on what may be a part of another value")

    def read(self, value: Any) -> str:
        if not isinstance(value, fx.Node):
            raise UnknownWord(f"{value!r} where a tensor is expected")
        return self.names[value]

    def emit(self, kind: str, sources: Sequence[str], name: str, **attributes: Any) -> str:
        self.nodes.append(self.onnx.helper.make_node(kind, list(sources), [name], name=f"{kind}_{name}", **attributes))
        return name

    def weight(self, name: str, tensor: Tensor) -> str:
        if name not in self.weights:
            self.weights[name] = self.onnx.numpy_helper.from_array(tensor.detach().contiguous().numpy(), name)
        return name

    def constant(self, values: float | Sequence[int]) -> str:
        tensor = torch.tensor(values, dtype=self.inputs[0].dtype if isinstance(values, float) else torch.int64)
        return self.weight(f"constant {values}", tensor)


def _conv(w: _Writer, node: fx.Node, conv: Any) -> str:
    if conv.padding_mode != "zeros":
        raise UnknownWord(conv.padding_mode)
    padding, reach = conv.padding, [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
    if padding == "same":
        pads = [r // 2 for r in reach] + [r - r // 2 for r in reach]
    else:
        pads = [0] * 2 * len(reach) if padding == "valid" else [*padding, *padding]
    sources = [w.read(node.args[0]), w.weight(f"{node.target}.weight", conv.weight)]
    if conv.bias is not None:
        sources.append(w.weight(f"{node.target}.bias", conv.bias))
    sizes = dict(kernel_shape=list(conv.kernel_size), strides=list(conv.stride), dilations=list(conv.dilation))
    return w.emit("Conv", sources, node.name, pads=pads, group=conv.groups, **sizes)


def _norm(w: _Writer, node: fx.Node, norm: Any) -> str:
    parts = [("weight", norm.weight), ("bias", norm.bias), ("mean", norm.running_mean), ("var", norm.running_var)]
    if any(tensor is None for _, tensor in parts):
        raise UnknownWord("a batch norm without statistics or weights")
    weights = [w.weight(f"{node.target}.{name}", tensor) for name, tensor in parts]
    return w.emit("BatchNormalization", [w.read(node.args[0]), *weights], node.name, epsilon=norm.eps)


def _clip(w: _Writer, node: fx.Node, value: Any, low: float, high: float) -> str:
    return w.emit("Clip", (w.read(value), w.constant(float(low)), w.constant(float(high))), node.name)


def _linear(w: _Writer, node: fx.Node, linear: Any) -> str:
    source = w.read(node.args[0])
    if source not in w.flat or linear.bias is None:
        raise UnknownWord("a linear layer on a map")
    weight, bias = w.weight(f"{node.target}.weight", linear.weight), w.weight(f"{node.target}.bias", linear.bias)
    w.flat.add(node.name)
    return w.emit("Gemm", (source, weight, bias), node.name, transB=1)


def _mean(w: _Writer, node: fx.Node, value: Any, dim: Any, keepdim: bool = False) -> str:
    if not (isinstance(dim, list | tuple) and len(dim) == 2 and set(dim) in ({2, 3}, {-1, -2})):
        raise UnknownWord(f"a mean over {dim}")
    if not keepdim:
        w.flat.add(node.name)
    return w.emit("ReduceMean", (w.read(value), w.constant([-2, -1])), node.name, keepdims=int(keepdim))


def _global_pool(w: _Writer, node: fx.Node, value: Any, output_size: Any) -> str:
    if output_size not in (1, (1, 1), [1, 1]):
        raise UnknownWord(f"a pool to {output_size}")
    return _mean(w, node, value, [-1, -2], keepdim=True)


def _flatten(w: _Writer, node: fx.Node, value: Any, start_dim: int = 0, end_dim: int = -1) -> str:
    if (start_dim, end_dim) != (1, -1):
        raise UnknownWord(f"flatten from {start_dim} to {end_dim}")
    w.flat.add(node.name)
    w.views.add(node.name)
    return w.emit("Flatten", (w.read(value),), node.name, axis=1)


def _add(w: _Writer, node: fx.Node, one: Any, two: Any) -> str:
    return w.emit("Add", (w.read(one), w.read(two)), node.name)


def _times(w: _Writer, node: fx.Node, one: Any, two: Any) -> str:
    return w.emit("Mul", (w.read(one), w.read(two)), node.name)


def _cat(w: _Writer, node: fx.Node, tensors: Any, dim: int = 0) -> str:
    return w.emit("Concat", [w.read(tensor) for tensor in tensors], node.name, axis=dim)


def _pad(w: _Writer, node: fx.Node, value: Any, pad: Any, mode: str = "constant", fill: float | None = None) -> str:
    if mode != "constant" or fill not in (None, 0) or min(pad) < 0 or w.inputs[0].dim() * 2 < len(pad):
        raise UnknownWord("a padding that is not with zeros")
    before, after = list(pad[-2::-2]), list(pad[::-2])  # PyTorch lists the last dimension first
    lead = [0] * (w.inputs[0].dim() - len(before))
    return w.emit("Pad", (w.read(value), w.constant([*lead, *before, *lead, *after])), node.name)


def _simple(kind: str, **attributes: Any) -> Callable[..., str]:
    def write(w: _Writer, node: fx.Node, value: Any, *modules: nn.Module) -> str:
        return w.emit(kind, (w.read(node.args[0]),), node.name, **attributes)

    return write


def _silu(w: _Writer, node: fx.Node, *_: Any) -> str:
    source = w.read(node.args[0])
    return w.emit("Mul", (source, w.emit("Sigmoid", (source,), f"{node.name}_gate")), node.name)


_RELU, _SIGMOID, _SWISH = _simple("Relu"), _simple("Sigmoid"), _simple("HardSwish")
_HARD_SIGMOID = _simple("HardSigmoid", alpha=1 / 6, beta=0.5)


def _relu6(w: _Writer, node: fx.Node, *_: Any) -> str:
    return _clip(w, node, node.args[0], 0.0, 6.0)


_MODULES: dict[type, Callable[..., str]] = {
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _conv),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _norm),
    nn.ReLU: _RELU,
    nn.ReLU6: _relu6,
    nn.Hardtanh: lambda w, node, m: _clip(w, node, node.args[0], m.min_val, m.max_val),
    nn.SiLU: _silu,
    nn.Sigmoid: _SIGMOID,
    nn.Hardswish: _SWISH,
    nn.Hardsigmoid: _HARD_SIGMOID,
    nn.Linear: _linear,
    nn.AdaptiveAvgPool2d: lambda w, node, m: _global_pool(w, node, node.args[0], m.output_size),
    nn.Flatten: lambda w, node, m: _flatten(w, node, node.args[0], m.start_dim, m.end_dim),
}
_CALLS: dict[Any, Callable[..., str]] = {
    **dict.fromkeys((operator.add, operator.iadd, torch.add, "add", "add_"), _add),
    **dict.fromkeys((operator.mul, torch.mul, "mul"), _times),
    **dict.fromkeys((F.relu, torch.relu, "relu", "relu_"), _RELU),
    **dict.fromkeys((torch.sigmoid, F.sigmoid, "sigmoid"), _SIGMOID),
    F.relu6: _relu6,
    F.silu: _silu,
    F.hardswish: _SWISH,
    F.hardsigmoid: _HARD_SIGMOID,
    F.adaptive_avg_pool2d: _global_pool,
    **dict.fromkeys((torch.flatten, "flatten"), _flatten),
    **dict.fromkeys((torch.cat, torch.concat), _cat),
    **dict.fromkeys((torch.mean, "mean"), _mean),
    F.pad: _pad,
}
