"""Assign a role to each node of the graph: convolution, norm, activation, addition, ... or the reason for a barrier."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.conv import _ConvNd

from depthfold.core import Refusal
from depthfold.tracing import modules as known
from depthfold.tracing import rules
from depthfold.tracing.factors import constant_factor
from depthfold.tracing.functional import USER_NAME, FunctionalConv, FunctionalNorm
from depthfold.tracing.rules import Reason, Site, first_reason, is_ignored
from depthfold.tracing.size_guard import SizeGuard

# Uses of modules: a module that is used in two places cannot be changed for one of them.


def count_calls(graph: fx.GraphModule) -> Counter[int]:
    """Return the number of calls of each module by its id, including calls inside opaque modules."""
    called = (graph.get_submodule(str(node.target)) for node in graph.graph.nodes if node.op == "call_module")
    return Counter(id(part) for module in called for part in module.modules())


def _enclosing(node: fx.Node) -> list[str]:
    """Return the paths of the modules around an operation, from the outermost one on."""
    return [str(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values()]


def _count_enclosing_calls(graph: fx.GraphModule) -> Counter[str]:
    """Return the number of calls of each submodule by its path. The keys of the stacks differ between calls."""
    stacks = (node.meta.get("nn_module_stack") or {} for node in graph.graph.nodes)
    found = {(key, str(path)) for stack in stacks for key, (path, _) in stack.items()}
    return Counter(path for _, path in found)


def paths_read_by_code(graph: fx.GraphModule) -> set[str]:
    """Return the paths of the modules with parameters that code reads directly, in themselves or in modules inside."""
    targets = (str(node.target).split(".") for node in graph.graph.nodes if node.op == "get_attr")
    return {".".join(names[:n]) for names in targets for n in range(1, len(names))}


# Reasons for operations that no span can contain.

# The words in the name of a class or function, such as max_pool2d or MaxPool2d.
_WORD = re.compile(r"[A-Z]+(?![a-z])\d*[a-z]?|[A-Z]?[a-z]+\d*[a-z]?|\d+")

# The prefixes of a word, the code and the reason. The first entry that matches applies.
_BY_NAME: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("pool", "mean", "amax", "avg"), "pooling", "pooling is not a convolution with trained weights"),
    (("cat", "concat", "stack"), "concatenation", "it concatenates the values of several branches"),
    (("norm",), "normalisation", "this normalisation depends on its input, so it cannot be folded into weights"),
    (("interpolate", "upsample", "upsampling", "pixel"), "resize", "it changes the size of the map"),
    (("linear",), "linear", "a fully connected layer is not a convolution"),
    (("softmax", "matmul", "bmm", "einsum", "attention"), "attention", "it multiplies values with each other"),
    (("mul", "imul", "truediv", "div"), "multiplication", "it multiplies by a value or a gate"),
    (("flatten", "view", "reshape", "permute", "transpose", "squeeze", "unfold"), "reshape", "it changes the layout"),
    (("chunk", "split", "getitem", "narrow", "roll", "shuffle"), "split", "it selects or reorders parts of the value"),
    (("getattr", "size", "dim", "shape"), "shape-read", "the code reads the shape of this value"),
    (("pad",), "padding", "it pads with something other than zeros, or crops"),
    (("dropout", "alpha"), "always-random", "this dropout is also active in evaluation"),
    (("add", "iadd", "sub", "isub", "sum"), "broadcast", "it adds something other than two maps of the same size"),
    (("conv",), "computed-weights", "its weights are computed in the forward, so they cannot be merged"),
)


def _function_reason(node: fx.Node, sizes: Mapping[fx.Node, torch.Size]) -> Reason:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    code, why = _by_name(name)
    operands = {sizes.get(operand) for operand in node.all_input_nodes}
    if code == "broadcast" and len(node.all_input_nodes) > 1 and len(operands) == 1:
        return "combination", f"it combines two maps other than as x + y or x - conv(y) ({name})"
    return code, why


def _by_name(name: str) -> Reason:
    parts = [part.lower() for part in _WORD.findall(name)]
    for words, code, why in _BY_NAME:
        if any(part.startswith(words) for part in parts):
            return code, f"{why} ({name})"
    return "custom", f"{name} is an unknown operation"


Sizes = Mapping[fx.Node, torch.Size]


class Kind(Enum):
    """The kinds of operations that tracing distinguishes."""

    CONVOLUTION = auto()
    NORM = auto()
    FACTOR = auto()
    ACTIVATION = auto()
    NO_OP = auto()  # dropout, drop-path and identity in evaluation
    PAD = auto()
    ADD = auto()
    OTHER = auto()


# What merging folds into the convolution before it.
AFFINE = (Kind.NORM, Kind.FACTOR)


@dataclass(frozen=True, slots=True)
class Role:
    """The role of a node: `detail` is the kind of an activation, also inside a norm; `refusal` the reason for OTHER."""

    kind: Kind
    detail: str | None = None
    refusal: Refusal | None = None


_ACTIVATION_FUNCTIONS: dict[Any, str] = {
    getattr(F, name): name.rstrip("_")
    for kind in known.ACTIVATIONS.values()
    for name in (kind, f"{kind}_")
    if hasattr(F, name)
} | {torch.relu: "relu", torch.relu_: "relu", torch.sigmoid: "sigmoid", torch.tanh: "tanh", torch.selu: "selu"}
_ACTIVATION_METHODS = {"relu", "relu_", "sigmoid", "sigmoid_", "tanh", "tanh_"}
_ADDITIONS = {operator.add, operator.iadd, torch.add}
_NEUTRAL: dict[int, set[Any]] = {0: _ADDITIONS, 1: {operator.mul, operator.imul, torch.mul, "mul", "mul_"}}
_NO_OP_METHODS = {"contiguous", "clone"}


def assign_roles(
    graph: fx.GraphModule,
    sizes: Sizes,
    opaque: Mapping[str, Reason],
    ignore: Iterable[str],
    elsewhere: Mapping[int, str] = MappingProxyType({}),
    at: str | None = None,
) -> dict[fx.Node, Role]:
    """Return the role of every node. `elsewhere` has the paths of modules outside the part `at` of a model by id."""
    modules = dict(graph.named_modules(remove_duplicate=False))
    calls, repeated = count_calls(graph), _count_enclosing_calls(graph)
    read = paths_read_by_code(graph)

    def role(node: fx.Node) -> Role:
        module = modules[str(node.target)] if node.op == "call_module" else None
        path = display_name(node)
        if node.op in ("call_module", "call_function", "call_method") and is_ignored(path, ignore):
            return _other(path, ("ignored", "it is in the ignore list"))
        if module is not None:
            size = sizes.get(node.all_input_nodes[0]) if node.all_input_nodes else None
            rank = None if size is None else len(size)
            read_by_code, outside = str(node.target) in read, elsewhere.get(id(module))
            times = calls[id(module)]
            outer = next((outer for outer in _enclosing(node) if outer != path and repeated[outer] == times), "")
            around = f"{at}.{outer}" if at and outer else outer
            return _module_role(path, Site(module, times, rank, outside, read_by_code, around), opaque)
        if node.op in ("call_function", "call_method"):
            return _function_role(node, path, sizes)
        return _other(node.name, (node.op, f"it is {_SPECIAL.get(node.op, 'not an operation')}"))

    return {node: role(node) for node in graph.graph.nodes}


_SPECIAL = {"placeholder": "the input of the network", "output": "an output of the network", "get_attr": "a parameter"}


def display_name(node: fx.Node) -> str:
    """Return a name that the user knows: the path of the called module, or of the module that calls the operation."""
    if node.op == "call_module":
        return str(node.meta.get(USER_NAME, node.target))
    path = enclosing_module(node)
    return f"{path}.{node.name}" if path else node.name


def enclosing_module(node: fx.Node) -> str:
    """Return the path of the module whose forward contains the operation."""
    return next(reversed(_enclosing(node)), "")


def _module_role(path: str, site: Site, opaque: Mapping[str, Reason]) -> Role:
    module = site.module
    if path in opaque:
        return _other(path, opaque[path])
    if isinstance(module, SizeGuard):
        return Role(Kind.NO_OP)
    if module.training:
        return _other(path, ("training-mode", "it stays in training mode when the model is in evaluation mode"))
    if isinstance(module, FunctionalConv):
        reason = first_reason(rules.FUNCTIONAL, site)
        return _other(path, reason) if reason else Role(Kind.CONVOLUTION)
    if isinstance(module, FunctionalNorm):
        return Role(Kind.NORM)
    if isinstance(module, known.TRANSPOSED):
        return _other(path, ("transposed", "a transposed convolution is not a convolution of its input"))
    if isinstance(module, _ConvNd):
        reason = first_reason(rules.CONVOLUTION, site)
        return _other(path, reason) if reason else Role(Kind.CONVOLUTION)
    if known.is_batch_norm(module):
        reason = first_reason(rules.NORM, site)
        fused = known.fused_activation(module)
        if fused is not None and known.activation_kind(fused) is None:
            reason = reason or ("custom-norm", f"it applies {type(fused).__name__}, which is not a known activation")
        if reason:
            return _other(path, reason)
        return Role(Kind.NORM, known.activation_kind(fused) if fused is not None else None)
    if (reason := first_reason(rules.PLAIN, site)) is not None:
        return _other(path, reason)
    if (kind := known.activation_kind(module)) is not None:
        return Role(Kind.ACTIVATION, kind)
    if known.is_no_op(module):
        return Role(Kind.NO_OP)
    if isinstance(module, known.ZERO_PADS) and _pads_map_with_zeros(module, site.rank):
        return Role(Kind.PAD)
    return _other(path, _by_name(type(module).__name__))


def _pads_map_with_zeros(module: nn.Module, rank: int | None) -> bool:
    widths: Any = module.padding
    spatial = rank is not None and len(widths) <= 2 * (rank - 2)
    return spatial and getattr(module, "value", 0) == 0 and min(widths) >= 0


def activation_function(node: fx.Node) -> str | None:
    """Return the kind of the activation that a function or method computes, or None."""
    if node.op == "call_method":
        return str(node.target).rstrip("_") if node.target in _ACTIVATION_METHODS else None
    return _ACTIVATION_FUNCTIONS.get(node.target) if node.op == "call_function" and _has_constants(node) else None


def _has_constants(node: fx.Node) -> bool:
    """Return True if no argument but the first is computed."""
    return not any(isinstance(arg, fx.Node) for arg in (*node.args[1:], *node.kwargs.values()))


def _function_role(node: fx.Node, path: str, sizes: Sizes) -> Role:
    target = node.target
    if (kind := activation_function(node)) is not None:
        return Role(Kind.ACTIVATION, kind)
    if (node.op == "call_method" and target in _NO_OP_METHODS) or changes_nothing(node):
        return Role(Kind.NO_OP)
    if target is F.pad and _has_constants(node) and (widths := zero_padding(node)) is not None:
        spatial = len(sizes.get(node, ())) - 2
        if len(widths) <= 2 * spatial:
            return Role(Kind.PAD)
    if _is_addition(node, sizes):
        return Role(Kind.ADD)
    if constant_factor(node) is not None:
        return Role(Kind.FACTOR)
    return _other(path, _function_reason(node, sizes))


def changes_nothing(node: fx.Node) -> bool:
    """Return True for y + 0, with which code that sums up branches often starts, and for y * 1, a usual default."""
    neutral = next((number for number, targets in _NEUTRAL.items() if node.target in targets), None)
    return len(node.args) == 2 and not node.kwargs and any(type(a) in (int, float) and a == neutral for a in node.args)


def zero_padding(node: fx.Node) -> tuple[int, ...] | None:
    """Return the widths of an F.pad that pads with zeros, or None if it does something else."""
    arguments = dict(zip(("input", "pad", "mode", "value"), node.args, strict=False)) | dict(node.kwargs)
    pad: Any = arguments.get("pad", ())
    zeros = arguments.get("mode", "constant") == "constant" and not arguments.get("value")
    return tuple(pad) if zeros and all(isinstance(p, int) and p >= 0 for p in pad) else None


def _is_addition(node: fx.Node, sizes: Sizes) -> bool:
    """Return True for an addition of two tensors of the same size, without broadcasting."""
    method = node.op == "call_method" and node.target in ("add", "add_")
    if not (method or node.target in _ADDITIONS) or node.kwargs or len(node.args) != 2:
        return False
    one, two = node.args
    if not (isinstance(one, fx.Node) and isinstance(two, fx.Node)):
        return False
    return one in sizes and sizes[one] == sizes.get(two) == sizes.get(node)


def _other(path: str, reason: Reason) -> Role:
    return Role(Kind.OTHER, refusal=Refusal(path, *reason))


# Squeeze-and-excite blocks: a gate that is computed from a pooled value multiplies the value itself.


def exclude_gates(roles: Mapping[fx.Node, Role], sizes: Sizes) -> dict[fx.Node, Role]:
    """Return the roles with a refusal for each convolution that computes a gate from a pooled value.

    These convolutions work on a single pixel, so merging them gains nothing, and their gate stays a barrier anyway.
    """
    changed = dict(roles)
    for node, role in roles.items():
        if role.refusal is None or role.refusal.code != "multiplication" or len(node.all_input_nodes) != 2:
            continue
        one, two = node.all_input_nodes
        for gate, gated in ((one, two), (two, one)):
            convolutions, pooled = _path_from_pool(gate, roles, sizes)
            if pooled is not None and (pooled is gated or _broadcast(gate, gated, sizes)):
                why = f"it computes the gate of a squeeze-and-excite from a pooled value ({display_name(node)})"
                for conv in convolutions:
                    changed[conv] = Role(Kind.OTHER, refusal=Refusal(display_name(conv), "squeeze-excite", why))
    return changed


def _path_from_pool(node: fx.Node, roles: Mapping[fx.Node, Role], sizes: Sizes) -> tuple[list[fx.Node], fx.Node | None]:
    """Return the convolutions on the path from a pool to this node and the pooled value; ([], None) without a pool."""
    convolutions: list[fx.Node] = []
    # A pool may also read the size of the map, which is not in `sizes`.
    while len(operands := [one for one in node.all_input_nodes if one.op != "get_attr" and one in sizes]) == 1:
        role, before = roles[node], operands[0]
        if role.refusal is not None and role.refusal.code == "pooling":
            return convolutions, before
        if role.kind is Kind.CONVOLUTION:
            convolutions.append(node)
        node = before
    return [], None


def _broadcast(gate: fx.Node, gated: fx.Node, sizes: Sizes) -> bool:
    """Return True if one pixel of the gate multiplies a whole map."""
    if gate not in sizes or gated not in sizes:
        return False
    return set(sizes[gate][2:]) <= {1} and not set(sizes[gated][2:]) <= {1}
