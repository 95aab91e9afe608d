"""Padding that depends on the size of the map: constant at the traced size, with a guard against other sizes.

TensorFlow's SAME padding with a stride is the example: it pads an even map by 1 and an odd one by 2. torch.fx cannot
record such a forward for all sizes, so it is recorded for the traced one. By recording it at other sizes too, we learn
whether anything but the padding depends on the size, and at which sizes the padding is the same.
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

from depthfold.core.shape import FixedPadding, SizeRule
from depthfold.errors import TraceError
from depthfold.tracing.forward import record
from depthfold.tracing.inputs import ExampleInputs
from depthfold.tracing.roles import zero_padding
from depthfold.tracing.size_guard import SizeCheck, SizeGuard
from depthfold.tracing.tracer import Failure


def guard_for(module: nn.Module, where: str, failure: Failure) -> tuple[SizeGuard, FixedPadding] | None:
    """Return the guard of a module that can be recorded for maps of one size, or None where it cannot be: where it
    receives maps of several sizes, or where more than its padding depends on the size."""
    given = failure.received[0] if failure.received else None
    if given is None or given.named or len(given.args) != 1 or not isinstance(given.args[0], Tensor):
        return None
    size = tuple(given.args[0].shape)
    if len(size) not in (3, 4, 5) or any(tuple(other.args[0].shape) != size for other in failure.received):
        return None
    probe = _Probe(copy.deepcopy(module).to("meta"), where, size, given.args[0].dtype)
    rules = probe.rules()
    if rules is None:
        return None
    checks = tuple(SizeCheck(dim, rule) for dim, rule in enumerate(rules, start=2))
    return SizeGuard(where, checks), FixedPadding(where=where, size=size[2:], rules=rules)


@dataclass(frozen=True, slots=True)
class _Recorded:
    """What a forward does at one size: its operations but for padding, and the padding before each of them."""

    operations: tuple[Any, ...]
    padding: Mapping[int, tuple[int, ...]]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Probe:
    """Records a module, without its weights, at other sizes than the traced one."""

    module: nn.Module
    where: str
    size: tuple[int, ...]
    dtype: torch.dtype

    def rules(self) -> tuple[SizeRule, ...] | None:
        traced = self.at({})
        if traced is None or not any(op[1] in _CONVOLUTIONS for op in traced.operations):
            return None
        if any(self.at({0: batch}) != traced for batch in _BATCHES):
            return None
        rules = [self.rule(dim, traced) for dim in range(2, len(self.size))]
        if None in rules:
            return None
        found = tuple(rule for rule in rules if rule is not None)
        # A question about both sides at once (their product, the smaller one) shows at the corners of what is allowed.
        for corner in ([rule.smallest for rule in found], [rule.largest for rule in found]):
            if self.at(dict(enumerate(corner, start=2))) != traced:
                return None
        return found

    def rule(self, dim: int, traced: _Recorded) -> SizeRule | None:
        """Return the rule for one dimension: padding repeats with the stride. Where other sizes, near and far, do not
        bear that out, the traced size alone is left. None where more than the padding depends on the size."""
        period, size = prod(traced.strides), self.size[dim]
        near = {other: self.at({dim: other}) for other in range(size, size + 2 * period)}
        if any(each is None or each.operations != traced.operations for each in near.values()):
            return None
        same = {other % period for other, each in near.items() if each == traced}
        far = {other: found for other in _far(size) if (found := self.at({dim: other})) is not None}  # None: too small
        if any(found.operations != traced.operations for found in far.values()):
            return None
        for other, found in (near | far).items():
            if (found == traced) != (other % period in same):
                return SizeRule(period=1, remainders=(0,), smallest=size, largest=size)
        allowed = [other for other in (size, *far) if other % period in same]
        largest = size + (_LARGEST - size) // period * period if size < _LARGEST else size
        if self.at({dim: largest}) != traced:
            return None
        remainders = tuple(sorted(same))
        return SizeRule(period=period, remainders=remainders, smallest=min(allowed), largest=largest)

    def at(self, sizes: Mapping[int, int]) -> _Recorded | None:
        """Record the module with these sizes instead of the traced ones. None where that is not possible."""
        size = [sizes.get(dim, n) for dim, n in enumerate(self.size)]
        inputs = ExampleInputs((torch.empty(size, dtype=self.dtype, device="meta"),))
        guard = SizeGuard(self.where, ())
        wrapped = _Alone(copy.deepcopy(self.module))
        try:
            recorded = record(wrapped, inputs, self.where, fixed={"module": guard})
        except TraceError:
            return None
        own = [name for name, _ in self.module.named_modules()] + list(self.module.state_dict())
        constants = set(recorded.kept) - {f"module.{name}" for name in own} - {*recorded.guards}
        # A constant that the forward makes may be made from the size.
        return None if recorded.failures or constants else _read(recorded.with_modules(wrapped))


# A batch is not part of a rule: whatever it is, the module must do the same.
_BATCHES = (1, 2, 3, 5, 8, 64, 1024)
_LARGEST = 4096


def _far(size: int) -> Iterator[int]:
    """Yield sizes that have little to do with the traced one, and all small ones."""
    others = {*range(1, 9), size // 2, size // 2 + 1, 2 * size, 2 * size + 1, 5 * size + 3, 225}
    yield from sorted(others - {0, size})


class _Alone(nn.Module):
    """The module as a submodule: a guard stands before submodules only."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        return self.module(x)


_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _read(graph: fx.GraphModule) -> _Recorded:
    """Return the operations of a graph, each zero padding with the operation that reads it."""
    padding: dict[int, tuple[int, ...]] = {}
    strides: list[int] = []
    numbers: dict[fx.Node, int] = {}
    behind: dict[fx.Node, tuple[fx.Node, tuple[int, ...]]] = {}  # a padding: what it pads, and by how much
    operations: list[Any] = []
    for node in graph.graph.nodes:
        if node.target is F.pad and (widths := zero_padding(node)) is not None:
            behind[node] = (node.all_input_nodes[0], widths)
            continue
        module = graph.get_submodule(str(node.target)) if node.op == "call_module" else None
        number = len(operations)
        for operand in node.all_input_nodes:
            if operand in behind and any(behind[operand][1]):
                padding[number] = behind[operand][1]
        arguments = fx.map_arg((node.args, node.kwargs), lambda n: f"%{numbers[behind[n][0] if n in behind else n]}")
        target = type(module) if module is not None else node.target
        settings = f"{node.target} {module.extra_repr()}" if module is not None else ""
        operations.append((node.op, target, settings, repr(arguments)))
        strides.extend(_stride(node, module))
        numbers[node] = number
    return _Recorded(tuple(operations), padding, tuple(strides))


def _stride(node: fx.Node, module: nn.Module | None) -> Iterator[int]:
    """Yield the stride of an operation, its largest over the dimensions."""
    given: Any = getattr(module, "stride", None) if module is not None else None
    if node.target in _CONVOLUTIONS:
        given = node.args[3] if len(node.args) > 3 else node.kwargs.get("stride", 1)
    if given:
        yield given if isinstance(given, int) else max(given)
