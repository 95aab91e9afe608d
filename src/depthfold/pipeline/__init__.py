"""compress(), which runs all stages in a run folder, and the stages that it consists of."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from depthfold.pipeline.compression import Compressed as Compressed
    from depthfold.pipeline.compression import compress as compress
    from depthfold.pipeline.options import Options as Options

# Imported on first use: the command line reads the options without importing torch.
_HOME = {"Compressed": "compression", "Options": "options", "compress": "compression"}

__all__ = ["Compressed", "Options", "compress"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'depthfold.pipeline' has no attribute {name!r}")
    return getattr(importlib.import_module(f"depthfold.pipeline.{_HOME[name]}"), name)
