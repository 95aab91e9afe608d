"""Find the sizes that do not depend on the size of the input, such as numbers of channels.

A condition on such sizes can be decided for the example inputs. Whether a size is one of them is found out by running
the recorded operations on inputs of other sizes, on the device "meta", which computes no values.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Collection, Iterator, Mapping
from fractions import Fraction
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from depthfold.tracing.proxies import is_shape

Scales = tuple[Fraction, Fraction]  # of the number of channels of the inputs, and of all their other sizes
_ONE, _HALF = Fraction(1), Fraction(1, 2)
_USUAL: tuple[Scales, ...] = ((_ONE, _ONE), (_ONE, Fraction(2)), (_ONE, Fraction(3)))
# A network may not run with these: then its weights fix the channels, or its maps have a least size.
_UNUSUAL: tuple[Scales, ...] = ((_ONE, _HALF), (Fraction(2), _ONE))


class ConstantSizes:
    """The sizes of values of a graph that is being recorded from `root`, for inputs of several sizes."""

    def __init__(self, root: nn.Module, example: Mapping[str, Any], guards: Collection[str]) -> None:
        self.example, self.guards = example, guards
        self._root = _without_values(root)
        self._found: dict[Scales, dict[fx.Node, Any]] = {scales: {} for scales in (*_USUAL, *_UNUSUAL)}

    def decide(self, node: fx.Node) -> bool:
        """Return True if all sizes from which a number is computed are the same for inputs of other sizes."""
        with torch.no_grad():
            return all(self._is_constant(read) for read in _size_reads(node))

    def _is_constant(self, node: fx.Node) -> bool:
        found = [self._value(node, scales) for scales in _USUAL]
        for scales in _UNUSUAL:
            with contextlib.suppress(Exception):
                found.append(self._value(node, scales))
        return all(type(one) is type(found[0]) and one == found[0] for one in found)

    def _value(self, wanted: fx.Node, scales: Scales) -> Any:
        found = self._found[scales]
        needed, waiting = set(), [wanted]
        while waiting:
            node = waiting.pop()
            if node not in found and node not in needed:
                needed.add(node)
                waiting += node.all_input_nodes
        for node in wanted.graph.nodes:
            if node in needed:
                args, kwargs = fx.map_arg((node.args, node.kwargs), found.__getitem__)
                found[node] = self._run(node, args, kwargs, scales)
        return found[wanted]

    def _run(self, node: fx.Node, args: Any, kwargs: Any, scales: Scales) -> Any:
        if node.op == "placeholder":
            return tree_map(lambda leaf: _of_other_size(leaf, scales), self.example[str(node.target)])
        return perform(self._root, node.op, node.target, args, kwargs, self.guards)


def _without_values(root: nn.Module) -> nn.Module:
    """Return a copy on the device "meta". The weights are not copied first: there may be no memory for them."""
    tensors: dict[int, Any] = {id(buffer): torch.empty_like(buffer, device="meta") for buffer in root.buffers()}
    for weight in root.parameters():
        tensors[id(weight)] = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)
    return copy.deepcopy(root, tensors).to("meta")


def perform(
    root: nn.Module, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], guards: Collection[str] = ()
) -> Any:
    """Return the value of an operation of a graph. Size guards return their input."""
    if op == "call_function":
        return target(*args, **kwargs)
    if op == "call_method":
        return getattr(args[0], target)(*args[1:], **kwargs)
    if op == "call_module":
        return args[0] if target in guards else root.get_submodule(target)(*args, **kwargs)
    return attrgetter(target)(root)


def _of_other_size(leaf: Any, scales: Scales) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    channels, others = scales
    size = [math.ceil(n * (channels if dim == 1 else others)) for dim, n in enumerate(leaf.shape)]
    return torch.empty(size, dtype=leaf.dtype, device="meta")


def _size_reads(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the operations that read sizes for a number that depends on sizes only."""
    if node.op == "call_method" or node.target is getattr or is_shape(node):
        yield node
    else:
        for operand in node.all_input_nodes:
            yield from _size_reads(operand)
