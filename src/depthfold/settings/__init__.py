"""Settings by name: the options of the command line, config.toml, and the stages that run with them.

compress() does not need this package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from depthfold.settings.config_file import gather, keep
from depthfold.settings.settings import Declaration, Settings, declarations

if TYPE_CHECKING:
    from depthfold.settings.session import Session as Session

__all__ = ["Declaration", "Session", "Settings", "declarations", "gather", "keep"]


def __getattr__(name: str) -> Any:
    if name != "Session":
        raise AttributeError(f"module 'depthfold.settings' has no attribute {name!r}")
    return importlib.import_module("depthfold.settings.session").Session  # imports torch
