"""Settings by name: the options of the command line, config.toml, and the stages that run with them.

compress() does not need this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from depthfold.settings.config_file import gather, keep, restored_after_errors
from depthfold.settings.settings import Declaration, Settings, declarations
from depthfold.support.optional import lazy_getattr

if TYPE_CHECKING:
    from depthfold.settings.session import Session

__getattr__ = lazy_getattr(__name__, {"session": "Session"})  # imports torch

__all__ = ["Declaration", "Session", "Settings", "declarations", "gather", "keep", "restored_after_errors"]
