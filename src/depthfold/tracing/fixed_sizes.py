"""Fix padding that depends on the map size at the traced size, with a guard against other sizes.

An example is TensorFlow's SAME padding with a stride: it pads an even map by 1 and an odd one by 2. torch.fx cannot
record such a forward for all sizes, so it is recorded for the traced size. Recordings at other sizes show whether
anything but the padding depends on the size, and which sizes have the same padding.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from depthfold.core import FixedPadding, SizeRule
from depthfold.errors import TraceError
from depthfold.tracing.forward import record
from depthfold.tracing.inputs import ExampleInputs
from depthfold.tracing.modules import called_module
from depthfold.tracing.roles import zero_padding
from depthfold.tracing.size_guard import SizeCheck, SizeGuard
from depthfold.tracing.tracer import Failure


def guard_for(module: nn.Module, where: str, failure: Failure) -> tuple[SizeGuard, FixedPadding] | None:
    """Return the guard of a module that can be recorded for maps of one size.

    Return None if the module receives maps of several sizes, or if more than its padding depends on the size.
    """
    inputs = failure.inputs[0] if failure.inputs else None
    if inputs is None or inputs.named or len(inputs.args) != 1 or not isinstance(inputs.args[0], Tensor):
        return None
    size = tuple(inputs.args[0].shape)
    if len(size) not in (3, 4, 5) or any(tuple(other.args[0].shape) != size for other in failure.inputs):
        return None
    probe = _Probe(copy.deepcopy(module).to("meta"), where, size, inputs.args[0].dtype)
    rules = probe.rules()
    if rules is None:
        return None
    checks = tuple(SizeCheck(dim, rule) for dim, rule in enumerate(rules, start=2))
    return SizeGuard(where, checks), FixedPadding(where=where, size=size[2:], rules=rules)


@dataclass(frozen=True, slots=True)
class _Recorded:
    """The operations of a forward at one size, without padding, and the padding before each of them."""

    operations: tuple[Any, ...]
    padding: Mapping[int, tuple[int, ...]]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Probe:
    """Record a module, without its weights, at sizes other than the traced one."""

    module: nn.Module
    where: str
    size: tuple[int, ...]
    dtype: torch.dtype

    def rules(self) -> tuple[SizeRule, ...] | None:
        """Return the rule for each spatial dimension, or None if more than the padding depends on the size."""
        traced = self.at({})
        if traced is None or not any(op[1] in _CONVOLUTIONS for op in traced.operations):
            return None
        if any(self.at({0: batch}) != traced for batch in _BATCHES):
            return None
        found = (self.rule(dim, traced) for dim in range(2, len(self.size)))
        rules = tuple(rule for rule in found if rule is not None)
        # A condition on both sides at once (such as their product or minimum) shows at the extreme allowed sizes.
        corners = ([rule.smallest for rule in rules], [rule.largest for rule in rules])
        same = all(self.at(dict(enumerate(corner, start=2))) == traced for corner in corners)
        return rules if same and len(rules) == len(self.size) - 2 else None

    def rule(self, dim: int, traced: _Recorded) -> SizeRule | None:
        """Return the sizes with the same padding, assuming that the padding repeats with the stride.

        If recordings at other sizes contradict this, the rule allows only the traced size. Return None if more than the
        padding depends on the size.
        """
        period, size = prod(traced.strides), self.size[dim]
        near = {other: self.at({dim: other}) for other in range(size, size + 2 * period)}
        if any(recorded is None or recorded.operations != traced.operations for recorded in near.values()):
            return None
        same = {other % period for other, recorded in near.items() if recorded == traced}
        # All small sizes, and some that are unrelated to the traced one.
        others = {*range(1, 9), size // 2, size // 2 + 1, 2 * size, 2 * size + 1, 5 * size + 3, 225} - {0, size}
        far = {other: found for other in sorted(others) if (found := self.at({dim: other}))}  # None if too small
        if any(found.operations != traced.operations for found in far.values()):
            return None
        for other, found in (near | far).items():
            if (found == traced) != (other % period in same):
                return SizeRule(period=1, remainders=(0,), smallest=size, largest=size)
        allowed = [other for other in (size, *far) if other % period in same]
        largest = size + (_LARGEST - size) // period * period if size < _LARGEST else size
        if self.at({dim: largest}) != traced:
            return None
        return SizeRule(period=period, remainders=tuple(sorted(same)), smallest=min(allowed), largest=largest)

    def at(self, sizes: Mapping[int, int]) -> _Recorded | None:
        """Record the module with these sizes instead of the traced ones. Return None if that is not possible."""
        size = [sizes.get(dim, n) for dim, n in enumerate(self.size)]
        inputs = ExampleInputs((torch.empty(size, dtype=self.dtype, device="meta"),))
        wrapped = _Wrapper(copy.deepcopy(self.module))
        try:
            recorded = record(wrapped, inputs, self.where, fixed={"module": SizeGuard(self.where, ())})
        except TraceError:
            return None
        own = [name for name, _ in self.module.named_modules()] + list(self.module.state_dict())
        constants = set(recorded.attributes) - {f"module.{name}" for name in own} - {*recorded.guards}
        # A constant that the forward creates may depend on the size.
        return None if recorded.failures or constants else _read(recorded.with_modules(wrapped))


# Rules do not restrict the batch, so the module must do the same for each of these.
_BATCHES = (1, 2, 3, 5, 8, 64, 1024)
_LARGEST = 4096


class _Wrapper(nn.Module):
    """A model with the module as its only submodule, because guards are only placed before submodules."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        return self.module(x)


_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _read(graph: fx.GraphModule) -> _Recorded:
    """Return the operations of a graph, with each zero padding assigned to the operation that reads it."""
    padding: dict[int, tuple[int, ...]] = {}
    strides: list[int] = []
    numbers: dict[fx.Node, int] = {}
    padded: dict[fx.Node, tuple[fx.Node, tuple[int, ...]]] = {}  # what each padding pads, and by how much
    operations: list[Any] = []
    for node in graph.graph.nodes:
        if node.target is F.pad and (widths := zero_padding(node)) is not None:
            padded[node] = (node.all_input_nodes[0], widths)
            continue
        module = called_module(graph, node)
        number = len(operations)
        for operand in node.all_input_nodes:
            if operand in padded and any(padded[operand][1]):
                padding[number] = padded[operand][1]
        arguments = fx.map_arg((node.args, node.kwargs), lambda n: f"%{numbers[padded[n][0] if n in padded else n]}")
        target = type(module) if module is not None else node.target
        settings = f"{node.target} {module.extra_repr()}" if module is not None else ""
        operations.append((node.op, target, settings, repr(arguments)))
        strides.extend(_stride(node, module))
        numbers[node] = number
    return _Recorded(tuple(operations), padding, tuple(strides))


def _stride(node: fx.Node, module: nn.Module | None) -> Iterator[int]:
    """Yield the stride of an operation, the largest over its dimensions."""
    stride: Any = getattr(module, "stride", None) if module is not None else None
    if node.target in _CONVOLUTIONS:
        stride = node.args[3] if len(node.args) > 3 else node.kwargs.get("stride", 1)
    if stride:
        yield stride if isinstance(stride, int) else max(stride)
