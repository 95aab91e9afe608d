"""Find the likely reason why a recording differs from the model, in the code of its forward."""

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

_TYPE_CHECKS = {"isinstance", "issubclass", "is_tensor", "type", "hasattr", "callable", "getattr"}


def likely_reason(module: nn.Module) -> Reason:
    """Return the most likely reason why the forward of this module was recorded incorrectly."""
    if is_hooked_inside(module):
        return "hooked", "it reads values collected by its hooks, which do not run while torch.fx records"
    for source in filter(None, map(_source, (type(module).forward, type(module)))):  # forward may call other methods
        found: dict[str, int] = {}
        for node in _outside_init(source[0]):
            if (kind := _kind(node)) is not None:
                found.setdefault(kind, node.lineno)  # type: ignore[attr-defined]
        for kind, why in _WHY.items():
            if kind in found:
                return kind, f"{why} ({_location(source, found[kind])}), so torch.fx records it incorrectly"
    return "misrecorded", "torch.fx records its forward incorrectly"


def _outside_init(tree: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(tree):
        if not (isinstance(child, ast.FunctionDef) and child.name == "__init__"):
            yield child
            yield from _outside_init(child)


_WHY = {
    "type-question": "its forward checks the type of a value",
    "caught-error": "its forward catches errors",
    "alias": "its forward writes in place to a value that has a second name",
    "state": "its forward reads state from an earlier call",
    "context": "its forward enters a context such as autocast",
}


def _kind(node: ast.AST) -> str | None:
    if isinstance(node, ast.Call):
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if name in _TYPE_CHECKS:
            return "type-question"
        if (name.endswith("_") and not name.endswith("__")) or any(word.arg == "out" for word in node.keywords):
            return "alias"
    if isinstance(node, ast.Try):
        return "caught-error"
    if isinstance(node, ast.With):
        return "context"
    targets = node.targets if isinstance(node, ast.Assign) else ()
    if isinstance(node, ast.AugAssign) or any(isinstance(target, ast.Subscript) for target in targets):
        return "alias"
    return "state" if any(isinstance(target, ast.Attribute) for target in targets) else None


def reads_training_mode(module: nn.Module) -> bool:
    """Return True if the code of a module reads `training`."""
    nodes = ast.walk(source[0]) if (source := _source(type(module))) else ()
    return any(isinstance(node, ast.Attribute) and node.attr == "training" for node in nodes)


def line_that_changes(module: nn.Module, name: str) -> str:
    """Return the line of a module's code that changes an attribute, in brackets, or "" if it is not found."""
    writes = r"(\s*[-+*/|&^%]*=(?!=)|\.\w+_\(|\[.*\]\s*=|\.(append|add|update)\()"
    pattern = re.compile(rf"\.{re.escape(name)}\b(\.data)?{writes}")
    for source in filter(None, map(_source, (type(module).forward, type(module)))):
        for number, line in enumerate(source[2], start=1):
            if pattern.search(line):
                return f" ({_location(source, number)})"
    return ""


Source = tuple[ast.AST, str, list[str], int]


def _source(function: Any) -> Source | None:
    try:
        lines, start = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
        return tree, Path(inspect.getsourcefile(function) or "").name, lines, start
    except (OSError, TypeError, SyntaxError):
        return None


def _location(source: Source, line: int) -> str:
    _, file, lines, start = source
    return f"{file}:{start + line - 1}, `{lines[line - 1].strip()}`"
