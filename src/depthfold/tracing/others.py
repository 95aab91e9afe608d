"""What is in the way, in words: operations that no span can hold."""

from __future__ import annotations

from torch import fx, nn

from depthfold.tracing.rules import Reason

# By words in the name of the class or function; the first that fits is taken.
_BY_NAME: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("pool", "mean", "amax", "avg"), "pooling", "pooling is no convolution with trained weights"),
    (("cat", "concat", "stack"), "concatenation", "values of several branches are put side by side"),
    (("norm",), "normalisation", "this normalisation depends on its input, so it cannot be folded into weights"),
    (("interpolate", "upsample", "pixelshuffle", "pixel_shuffle"), "resize", "it changes the size of the map"),
    (("linear",), "linear", "a fully connected layer is no convolution of a map"),
    (("softmax", "matmul", "bmm", "einsum", "attention"), "attention", "it multiplies values with one another"),
    (("mul", "imul"), "multiplication", "it multiplies with a value or a gate"),
    (("flatten", "view", "reshape", "permute", "transpose", "squeeze", "unfold"), "reshape", "it changes the layout"),
    (
        ("chunk", "split", "getitem", "narrow", "roll", "shuffle"),
        "split",
        "it takes a part of the value or reorders it",
    ),
    (("getattr", "size", "dim", "shape"), "shape-read", "the code reads the shape of this value"),
    (("pad",), "padding", "it pads with something other than zeros, or crops"),
    (("add", "iadd", "sub", "sum"), "broadcast", "it adds values that are no two maps of one size"),
    (("conv",), "functional-convolution", "a convolution without a module of its own has no weights to merge"),
)


def module_reason(module: nn.Module) -> Reason:
    return _by_name(type(module).__name__)


def function_reason(node: fx.Node) -> Reason:
    return _by_name(node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target)))


def _by_name(name: str) -> Reason:
    for words, code, why in _BY_NAME:
        if any(word in name.lower() for word in words):
            return code, f"{why} ({name})"
    return "custom", f"{name} is an operation that we do not know"
