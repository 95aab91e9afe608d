"""Modules and parameters whose names are Python keywords, such as nn.ModuleDict({"in": ..., "class": ...}).

torch.fx writes `self.in(x)` for them, which is not Python. It writes `getattr(self, "0")` for names that are not
identifiers; this makes it do so for keywords too, here and wherever a graph is unpickled.
"""

from __future__ import annotations

import keyword
from typing import Any

import torch.fx.graph


def _format_target(base: str, target: str) -> str:
    text = base
    for name in target.split("."):
        plain = name.isidentifier() and not keyword.iskeyword(name)
        text = f"{text}.{name}" if plain else f'getattr({text}, "{name}")'
    return text


def allow_keywords() -> None:
    graph: Any = torch.fx.graph
    graph._format_target = _format_target
