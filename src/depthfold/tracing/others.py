"""What is in the way, in words: operations that no span can hold."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import fx, nn

from depthfold.tracing.rules import Reason

# The words in the name of a class or function: max_pool2d, MaxPool2d.
_WORD = re.compile(r"[A-Z]+(?![a-z])\d*[a-z]?|[A-Z]?[a-z]+\d*[a-z]?|\d+")

# By how one of the words starts; the first entry that fits is taken.
_BY_NAME: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("pool", "mean", "amax", "avg"), "pooling", "pooling is no convolution with trained weights"),
    (("cat", "concat", "stack"), "concatenation", "values of several branches are put side by side"),
    (("norm",), "normalisation", "this normalisation depends on its input, so it cannot be folded into weights"),
    (("interpolate", "upsample", "upsampling", "pixel"), "resize", "it changes the size of the map"),
    (("linear",), "linear", "a fully connected layer is no convolution of a map"),
    (("softmax", "matmul", "bmm", "einsum", "attention"), "attention", "it multiplies values with one another"),
    (("mul", "imul", "truediv", "div"), "multiplication", "it multiplies with a value or a gate"),
    (("flatten", "view", "reshape", "permute", "transpose", "squeeze", "unfold"), "reshape", "it changes the layout"),
    (
        ("chunk", "split", "getitem", "narrow", "roll", "shuffle"),
        "split",
        "it takes a part of the value or reorders it",
    ),
    (("getattr", "size", "dim", "shape"), "shape-read", "the code reads the shape of this value"),
    (("pad",), "padding", "it pads with something other than zeros, or crops"),
    (("dropout", "alpha"), "always-random", "this dropout is on in evaluation, too"),
    (("add", "iadd", "sub", "isub", "sum"), "broadcast", "it adds values that are no two maps of one size"),
    (("conv",), "computed-weights", "its forward computes the weights, so there are none to merge"),
)


def module_reason(module: nn.Module) -> Reason:
    return _by_name(type(module).__name__)


def function_reason(node: fx.Node, sizes: Mapping[fx.Node, torch.Size]) -> Reason:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    code, why = _by_name(name)
    operands = {sizes.get(operand) for operand in node.all_input_nodes}
    if code == "broadcast" and len(node.all_input_nodes) > 1 and len(operands) == 1:
        return "combination", f"it combines two maps in a way that no kernel can hold ({name})"
    return code, why


def _by_name(name: str) -> Reason:
    parts = [part.lower() for part in _WORD.findall(name)]
    for words, code, why in _BY_NAME:
        if any(part.startswith(words) for part in parts):
            return code, f"{why} ({name})"
    return "custom", f"{name} is an operation that we do not know"
