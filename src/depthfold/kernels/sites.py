"""Find the operations of an fx graph that the kernels compute together."""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

SIZES = ((3, 3), (5, 5))  # of the depthwise convolutions that the kernels compute

# Output channels of a 1x1 convolution that normalises the map as it reads it: a tile of its backward holds all of them.
MOST_OUTPUTS = 128

_IN_PLACE: tuple[Any, ...] = (operator.iadd, operator.isub, operator.imul, operator.itruediv)
_ADDITIONS: tuple[Any, ...] = (operator.add, operator.iadd, torch.add)
_CAPS: dict[Any, float] = {
    nn.ReLU: inf, F.relu: inf, torch.relu: inf, "relu": inf, nn.ReLU6: 6.0, F.relu6: 6.0
}  # fmt: skip
_TWO: tuple[Any, ...] = (2, (2, 2))
Kind = Literal["depthwise", "pointwise", "other"]
Modules = dict[fx.Node, nn.Module]


@dataclass(slots=True, eq=False)
class NormSite:
    """A batch norm, and the addition, the activation and the max pool that follow it. `chain` are their nodes."""

    module: nn.BatchNorm2d
    chain: list[fx.Node]
    residual: fx.Node | None = None
    cap: float | None = None  # the activation clamps to 0..cap
    pool: bool = False

    @property
    def source(self) -> fx.Node:
        return self.chain[0].all_input_nodes[0]

    @property
    def last(self) -> fx.Node:
        return self.chain[-1]


@dataclass(slots=True, eq=False)
class ConvSite:
    """A convolution of the map `source`. `following` is the batch norm after it.

    It takes over `pad`, a zero padding before it with widths as in F.pad, and `norm`, the batch norm before that.
    """

    module: nn.Conv2d
    kind: Kind
    source: fx.Node
    pad: fx.Node | None = None
    widths: tuple[int, int, int, int] = (0, 0, 0, 0)
    norm: NormSite | None = None
    following: NormSite | None = None

    @property
    def padding(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The rows and columns of zeros before the map, and those after it."""
        own: Any = self.module.padding
        left, right, top, bottom = self.widths
        return (own[0] + top, own[1] + left), (own[0] + bottom, own[1] + right)

    @property
    def adds_bias(self) -> bool:
        """True if the output includes the bias. The output of a batch norm after it does not depend on the bias."""
        return self.module.bias is not None and self.following is None

    @property
    def has_kernel(self) -> bool:
        return self.norm is not None or self.kind == "depthwise"


@dataclass(frozen=True, slots=True)
class Sites:
    convs: dict[fx.Node, ConvSite]
    linears: dict[fx.Node, nn.Linear]
    norms: dict[fx.Node, NormSite]  # by their last node
    inside: set[fx.Node]  # the nodes that another node computes as well

    def __bool__(self) -> bool:
        return bool(self.norms) or any(conv.has_kernel for conv in self.convs.values())

    def weights(self) -> dict[tuple[fx.Node, str], Tensor]:
        """Return the weights and biases that are used, by the nodes of their layers."""
        found: dict[tuple[fx.Node, str], Tensor] = {
            (node, "weight"): layer.weight for node, layer in self.linears.items()
        }
        found |= {(node, "bias"): layer.bias for node, layer in self.linears.items() if layer.bias is not None}
        found |= {(node, "weight"): conv.module.weight for node, conv in self.convs.items()}
        return found | {
            (node, "bias"): conv.module.bias
            for node, conv in self.convs.items()
            if conv.module.bias is not None and conv.adds_bias
        }


def find_sites(graph: fx.GraphModule, *, training: bool) -> Sites:
    """Find the convolutions, the linear layers, and the batch norms that are in this mode."""
    modules = {node: module for node in graph.graph.nodes if (module := plain_module(graph, node)) is not None}
    calls = Counter(id(module) for module in modules.values())
    norms: dict[fx.Node, NormSite] = {}
    for node, module in modules.items():
        # A batch norm that is called twice updates its statistics twice.
        if type(module) is nn.BatchNorm2d and calls[id(module)] == 1 and _is_supported(module, training):
            site = _norm_site(module, node, modules)
            norms[site.last] = site
    convs = {
        node: ConvSite(module, _kind(module), node.all_input_nodes[0])
        for node, module in modules.items()
        if type(module) is nn.Conv2d and module.padding_mode == "zeros"
    }
    _connect(convs, norms, modules)
    inside = {node for site in norms.values() for node in site.chain[:-1]}
    inside |= {conv.norm.last for conv in convs.values() if conv.norm is not None}
    inside |= {conv.pad for conv in convs.values() if conv.pad is not None}
    return Sites(convs, {n: m for n, m in modules.items() if type(m) is nn.Linear}, norms, inside)


def plain_module(graph: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    """Return the module that a node calls with one argument, unless it has hooks or a forward of its own."""
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs or not isinstance(node.args[0], fx.Node):
        return None
    module = graph.get_submodule(str(node.target))
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return None if any(hooks) or "forward" in vars(module) else module


def _is_supported(norm: nn.BatchNorm2d, training: bool) -> bool:
    return (
        norm.training == training
        and norm.affine
        and norm.running_mean is not None
        and norm.momentum is not None
        and norm.num_features % 8 == 0
        and norm.weight.dtype is norm.running_mean.dtype is torch.float32
    )


def _kind(conv: nn.Conv2d) -> Kind:
    simple = conv.dilation == (1, 1) and isinstance(conv.padding, tuple) and conv.stride[0] == conv.stride[1]
    if not simple or conv.in_channels % 8 or conv.out_channels % 8:
        return "other"
    if conv.kernel_size == (1, 1) and conv.groups == 1 and conv.stride == (1, 1):
        return "pointwise"
    depthwise = conv.groups == conv.in_channels == conv.out_channels and conv.kernel_size in SIZES
    return "depthwise" if depthwise and conv.stride[0] in (1, 2) else "other"


def _norm_site(norm: nn.BatchNorm2d, node: fx.Node, modules: Modules) -> NormSite:
    """Follow the value of a batch norm as long as nothing else reads it."""
    site = NormSite(norm, [node])
    user = _only_user(node)
    if user is not None and (residual := _residual(user, node)) is not None:
        site.residual = residual
        site.chain.append(user)
        user = _only_user(user)
    if user is not None and (cap := _cap(user, modules)) is not None:
        site.cap = cap
        site.chain.append(user)
        user = _only_user(user)
    if user is not None and site.residual is None and _is_pool(modules.get(user)):
        site.pool = True
        site.chain.append(user)
    return site


def _connect(convs: dict[fx.Node, ConvSite], norms: dict[fx.Node, NormSite], modules: Modules) -> None:
    """Connect the convolutions with the batch norms before and after them, and with the zero padding before them."""
    readers = {site.source: site for site in norms.values()}
    for node, conv in convs.items():
        if _only_user(node) is not None:
            conv.following = readers.get(node)
        if conv.kind == "depthwise" and conv.adds_bias:
            conv.kind = "other"
        _take_over_pad(conv, modules)
        before = norms.get(conv.source)
        if before is None or before.residual is not None or before.pool or _only_user(before.last) is None:
            continue
        small = conv.module.out_channels <= MOST_OUTPUTS and not any(conv.module.padding) and not conv.adds_bias
        if conv.kind == "depthwise" or (conv.kind == "pointwise" and small):
            conv.norm = before


def _take_over_pad(conv: ConvSite, modules: Modules) -> None:
    """Let a convolution pad its input itself. Only the depthwise kernels pad the two sides by different widths."""
    pad = conv.source
    widths = _zero_padding(pad, modules.get(pad))
    if widths is None or _only_user(pad) is None or isinstance(conv.module.padding, str):
        return
    # The convolution reads the map later than the padding did.
    if any(_writes_in_place(user, modules.get(user)) for user in pad.all_input_nodes[0].users):
        return
    left, right, top, bottom = widths
    if conv.kind == "depthwise" or (conv.kind == "other" and left == right and top == bottom):
        conv.pad, conv.widths, conv.source = pad, widths, pad.all_input_nodes[0]


def _writes_in_place(node: fx.Node, module: nn.Module | None) -> bool:
    name = str(getattr(node.target, "__name__", node.target))
    given = getattr(module, "inplace", node.kwargs.get("inplace", False))
    return bool(given) or name.endswith("_") or node.target in _IN_PLACE


def _zero_padding(node: fx.Node, module: nn.Module | None) -> tuple[int, int, int, int] | None:
    """Return the widths by which a node pads rows and columns with zeros, or None if it does something else."""
    widths: Any = module.padding if type(module) is nn.ZeroPad2d else None
    zeros = node.kwargs.get("mode", "constant") == "constant" and not node.kwargs.get("value")
    if node.target is F.pad and len(node.args) == 2 and zeros:
        widths = node.args[1]
    valid = isinstance(widths, (tuple, list)) and len(widths) == 4 and all(type(w) is int and w >= 0 for w in widths)
    return tuple(widths) if valid else None


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _residual(node: fx.Node, value: fx.Node) -> fx.Node | None:
    """Return the other operand of an addition to the value, or None if the node is something else."""
    adds = node.target in _ADDITIONS if node.op == "call_function" else (node.op, node.target) == ("call_method", "add")
    if not adds or node.kwargs or len(node.args) != 2:
        return None
    if node.target is operator.iadd and node.args[0] is not value:
        return None  # it also changes the other operand
    others = [operand for operand in node.args if operand is not value]
    return others[0] if len(others) == 1 and isinstance(others[0], fx.Node) else None


def _cap(node: fx.Node, modules: Modules) -> float | None:
    """Return the upper bound of an activation that clamps its input, or None if the node is something else."""
    if node.op == "call_module":
        return _CAPS.get(type(modules.get(node)))
    return _CAPS.get(node.target) if len(node.args) == 1 and set(node.kwargs) <= {"inplace"} else None


def _is_pool(module: nn.Module | None) -> bool:
    return (
        type(module) is nn.MaxPool2d
        and module.kernel_size in _TWO
        and module.stride in _TWO
        and module.padding in (0, (0, 0))
        and module.dilation in (1, (1, 1))
        and not module.ceil_mode
        and not module.return_indices
    )
