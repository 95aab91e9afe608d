"""Operations that change their input: they matter even where nobody reads what they return."""

from __future__ import annotations

import operator

from torch import fx, nn

_IN_PLACE_OPERATORS = {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.setitem}


def writes_in_place(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether the node changes its input, so that it matters even where nobody reads its result."""
    if module is not None:
        return bool(getattr(module, "inplace", False))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or node.target in _IN_PLACE_OPERATORS or node.kwargs.get("inplace") is True


def adds_in_place(node: fx.Node) -> bool:
    return node.target in (operator.iadd, "add_")
