"""Why a recording differs from the model: what in the code of a forward is known to mislead torch.fx."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from depthfold.tracing.modules import is_hooked_inside
from depthfold.tracing.rules import Reason

_ASKS = {"isinstance", "issubclass", "is_tensor", "type", "hasattr", "callable", "getattr"}


def suspect(module: nn.Module) -> Reason:
    """Return the likeliest reason why the forward of this module was recorded as something else."""
    if is_hooked_inside(module):
        return "hooked", "it reads what its hooks have collected, and they do not run while torch.fx records"
    for source in filter(None, map(_source, (type(module).forward, type(module)))):  # a forward may call other methods
        found: dict[str, int] = {}
        for node in _outside_init(source[0]):
            if (kind := _kind(node)) is not None:
                found.setdefault(kind, node.lineno)  # type: ignore[attr-defined]
        for kind, why in _WHY.items():
            if kind in found:
                place = _place(source, found[kind])
                return kind, f"{why} ({place}), so torch.fx records another computation than it runs"
    return "misrecorded", "torch.fx records another computation than its forward runs"


def _outside_init(tree: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(tree):
        if not (isinstance(child, ast.FunctionDef) and child.name == "__init__"):
            yield child
            yield from _outside_init(child)


_WHY = {
    "type-question": "its forward asks for the type of a value",
    "caught-error": "its forward catches errors",
    "alias": "its forward writes in place to a value that has another name",
    "state": "its forward reads what an earlier call has kept",
}


def _kind(node: ast.AST) -> str | None:
    if isinstance(node, ast.Call):
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if name in _ASKS:
            return "type-question"
        if (name.endswith("_") and not name.endswith("__")) or any(word.arg == "out" for word in node.keywords):
            return "alias"
    if isinstance(node, ast.Try):
        return "caught-error"
    if isinstance(node, ast.AugAssign):
        return "alias"
    if isinstance(node, ast.Assign) and any(isinstance(target, ast.Subscript) for target in node.targets):
        return "alias"
    if isinstance(node, ast.Assign) and any(isinstance(target, ast.Attribute) for target in node.targets):
        return "state"
    return None


def asks_for_mode(module: nn.Module) -> bool:
    """Return whether the code of a module asks whether it is in training mode."""
    source = _source(type(module))
    return source is not None and any(
        isinstance(n, ast.Attribute) and n.attr == "training" for n in ast.walk(source[0])
    )


def where_changed(module: nn.Module, name: str) -> str:
    """Return the line of a module's code that changes an attribute, in brackets, or nothing where it is not found."""
    writes = r"(\s*[-+*/|&^%]*=(?!=)|\.\w+_\(|\[.*\]\s*=|\.(append|add|update)\()"
    pattern = re.compile(rf"\.{re.escape(name)}\b(\.data)?{writes}")
    for source in filter(None, map(_source, (type(module).forward, type(module)))):
        for number, line in enumerate(source[2], start=1):
            if pattern.search(line):
                return f" ({_place(source, number)})"
    return ""


Source = tuple[ast.AST, str, list[str], int]


def _source(function: Any) -> Source | None:
    try:
        lines, start = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
        return tree, Path(inspect.getsourcefile(function) or "").name, lines, start
    except (OSError, TypeError, SyntaxError):
        return None


def _place(source: Source, line: int) -> str:
    _, file, lines, start = source
    return f"{file}:{start + line - 1}, `{lines[line - 1].strip()}`"
