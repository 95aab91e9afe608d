"""Recognise multiplications by a constant factor: y * 0.1, y / 4 and -y."""

from __future__ import annotations

import math
import operator
import sys
from typing import Any

import torch
from torch import fx

_PRODUCTS: frozenset[Any] = frozenset({operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "mul_"})
_QUOTIENTS: frozenset[Any] = frozenset({
    operator.truediv, operator.itruediv, torch.div, torch.true_divide, "div", "div_", "true_divide"
})  # fmt: skip
_NEGATIONS: frozenset[Any] = frozenset({operator.neg, torch.neg, torch.negative, "neg", "neg_"})


def constant_factor(node: fx.Node) -> float | None:
    """Return the finite number by which the node multiplies its only input, or None if it does something else."""
    if node.op not in ("call_function", "call_method") or node.kwargs or len(node.all_input_nodes) != 1:
        return None
    if node.target in _NEGATIONS:
        return -1.0
    given: tuple[Any, ...] = node.args
    numbers = [arg for arg in given if type(arg) in (int, float) and abs(arg) < sys.float_info.max]
    if len(node.args) != 2 or len(numbers) != 1:
        return None
    (number,) = numbers
    if node.target in _QUOTIENTS and isinstance(node.args[0], fx.Node) and number:
        number = 1 / number
    elif node.target not in _PRODUCTS:
        return None
    return float(number) if math.isfinite(number) else None
