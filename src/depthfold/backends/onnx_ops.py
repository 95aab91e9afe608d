"""The operations that the ONNX writer supports: modules, functions and methods of plain CNNs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn


class UnsupportedOp(Exception):
    """The ONNX writer does not support an operation of the graph."""


class Writer(Protocol):
    """The part of the writer that an operation uses."""

    flat: set[str]  # values with two dimensions
    views: set[str]  # values that share memory with another one

    @property
    def dims(self) -> int:
        """The number of dimensions of the input and of every feature map."""

    def read(self, value: Any) -> str:
        """Return the name of the ONNX value of a node."""

    def unused(self, name: str) -> str:
        """Return a name that no other value has: this one, or one with underscores."""

    def emit(self, kind: str, sources: Sequence[str], name: str, **attributes: Any) -> str:
        """Add an operation whose result is called `name`."""

    def weight(self, name: str, tensor: Tensor) -> str:
        """Add a tensor, unless it was added before."""

    def constant(self, values: float | Sequence[int]) -> str:
        """Add a float in the dtype of the feature maps, or integers."""


def _conv(w: Writer, node: fx.Node, conv: Any) -> str:
    if conv.padding_mode != "zeros":
        raise UnsupportedOp(conv.padding_mode)
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


def _norm(w: Writer, node: fx.Node, norm: Any) -> str:
    parts = [("weight", norm.weight), ("bias", norm.bias), ("mean", norm.running_mean), ("var", norm.running_var)]
    if any(tensor is None for _, tensor in parts):
        raise UnsupportedOp("a batch norm without statistics or weights")
    weights = [w.weight(f"{node.target}.{name}", tensor) for name, tensor in parts]
    return w.emit("BatchNormalization", [w.read(node.args[0]), *weights], node.name, epsilon=norm.eps)


def _clip(w: Writer, node: fx.Node, value: Any, low: float, high: float) -> str:
    return w.emit("Clip", (w.read(value), w.constant(float(low)), w.constant(float(high))), node.name)


def _linear(w: Writer, node: fx.Node, linear: Any) -> str:
    source = w.read(node.args[0])
    if source not in w.flat or linear.bias is None:
        raise UnsupportedOp("a linear layer on a feature map")
    weight, bias = w.weight(f"{node.target}.weight", linear.weight), w.weight(f"{node.target}.bias", linear.bias)
    w.flat.add(node.name)
    return w.emit("Gemm", (source, weight, bias), node.name, transB=1)


def _mean(w: Writer, node: fx.Node, input: Any, dim: Any, keepdim: bool = False) -> str:
    if w.dims != 4 or not (isinstance(dim, list | tuple) and len(dim) == 2 and set(dim) in ({2, 3}, {-1, -2})):
        raise UnsupportedOp(f"a mean over {dim}")
    if not keepdim:
        w.flat.add(node.name)
    return w.emit("ReduceMean", (w.read(input), w.constant([-2, -1])), node.name, keepdims=int(keepdim))


def _global_pool(w: Writer, node: fx.Node, input: Any, output_size: Any) -> str:
    if output_size not in (1, (1, 1), [1, 1]):
        raise UnsupportedOp(f"a pool to {output_size}")
    return _mean(w, node, input, [-1, -2], keepdim=True)


def _flatten(w: Writer, node: fx.Node, input: Any, start_dim: int = 0, end_dim: int = -1) -> str:
    if (start_dim, end_dim) != (1, -1):
        raise UnsupportedOp(f"flatten from {start_dim} to {end_dim}")
    w.flat.add(node.name)
    w.views.add(node.name)
    return w.emit("Flatten", (w.read(input),), node.name, axis=1)


def _add(w: Writer, node: fx.Node, input: Any, other: Any) -> str:
    return w.emit("Add", (w.read(input), w.read(other)), node.name)


def _mul(w: Writer, node: fx.Node, input: Any, other: Any) -> str:
    return w.emit("Mul", (w.read(input), w.read(other)), node.name)


def _cat(w: Writer, node: fx.Node, tensors: Any, dim: int = 0) -> str:
    return w.emit("Concat", [w.read(tensor) for tensor in tensors], node.name, axis=dim)


def _pad(w: Writer, node: fx.Node, input: Any, pad: Any, mode: str = "constant", value: float | None = None) -> str:
    if mode != "constant" or value not in (None, 0) or min(pad) < 0 or w.dims * 2 < len(pad):
        raise UnsupportedOp("padding with values other than zero")
    if w.flat:  # the value may have fewer dimensions than a feature map
        raise UnsupportedOp("padding after flattening")
    before, after = list(pad[-2::-2]), list(pad[::-2])  # PyTorch lists the last dimension first
    lead = [0] * (w.dims - len(before))
    return w.emit("Pad", (w.read(input), w.constant([*lead, *before, *lead, *after])), node.name)


def _max_pool(
    w: Writer,
    node: fx.Node,
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> str:
    if ceil_mode or return_indices:
        raise UnsupportedOp("a max pool with ceil mode or indices")
    sizes = [[n, n] if isinstance(n, int) else [*n] for n in (kernel_size, stride or kernel_size, padding, dilation)]
    named = dict(kernel_shape=sizes[0], strides=sizes[1], pads=sizes[2] * 2, dilations=sizes[3])
    return w.emit("MaxPool", (w.read(input),), node.name, **named)


def _max_pool_module(w: Writer, node: fx.Node, pool: Any) -> str:
    sizes = pool.kernel_size, pool.stride, pool.padding, pool.dilation
    return _max_pool(w, node, node.args[0], *sizes, pool.ceil_mode, pool.return_indices)


def _simple(kind: str, **attributes: Any) -> Callable[..., str]:
    def write(w: Writer, node: fx.Node, input: Any) -> str:
        return w.emit(kind, (w.read(input),), node.name, **attributes)

    return write


def _silu(w: Writer, node: fx.Node, input: Any) -> str:
    source = w.read(input)
    gate = w.emit("Sigmoid", (source,), w.unused(f"{node.name}_gate"))
    return w.emit("Mul", (source, gate), node.name)


_RELU, _SIGMOID, _HARD_SWISH = _simple("Relu"), _simple("Sigmoid"), _simple("HardSwish")
_HARD_SIGMOID = _simple("HardSigmoid", alpha=1 / 6, beta=0.5)


def _relu6(w: Writer, node: fx.Node, input: Any) -> str:
    return _clip(w, node, input, 0.0, 6.0)


def _as_module(write: Callable[..., str]) -> Callable[..., str]:
    """Convert the writer of a function to that of a module without options."""
    return lambda w, node, module: write(w, node, node.args[0])


MODULES: dict[type, Callable[..., str]] = {
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _conv),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _norm),
    nn.ReLU: _as_module(_RELU),
    nn.ReLU6: _as_module(_relu6),
    nn.Hardtanh: lambda w, node, m: _clip(w, node, node.args[0], m.min_val, m.max_val),
    nn.SiLU: _as_module(_silu),
    nn.Sigmoid: _as_module(_SIGMOID),
    nn.Hardswish: _as_module(_HARD_SWISH),
    nn.Hardsigmoid: _as_module(_HARD_SIGMOID),
    nn.Linear: _linear,
    nn.AdaptiveAvgPool2d: lambda w, node, m: _global_pool(w, node, node.args[0], m.output_size),
    nn.MaxPool2d: _max_pool_module,
    nn.Flatten: lambda w, node, m: _flatten(w, node, node.args[0], m.start_dim, m.end_dim),
}
CALLS: dict[Any, Callable[..., str]] = {
    **dict.fromkeys((operator.add, operator.iadd, torch.add, "add", "add_"), _add),
    **dict.fromkeys((operator.mul, torch.mul, "mul"), _mul),
    **dict.fromkeys((F.relu, torch.relu, "relu", "relu_"), _RELU),
    **dict.fromkeys((torch.sigmoid, F.sigmoid, "sigmoid"), _SIGMOID),
    F.relu6: _relu6,
    F.silu: _silu,
    F.hardswish: _HARD_SWISH,
    F.hardsigmoid: _HARD_SIGMOID,
    F.max_pool2d: _max_pool,
    F.adaptive_avg_pool2d: _global_pool,
    **dict.fromkeys((torch.flatten, "flatten"), _flatten),
    **dict.fromkeys((torch.cat, torch.concat), _cat),
    **dict.fromkeys((torch.mean, "mean"), _mean),
    F.pad: _pad,
}
