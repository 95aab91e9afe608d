"""Optional libraries: imported where they are first used, or explained where they are not there."""

from __future__ import annotations

import importlib
from types import ModuleType

from depthfold.errors import MissingDependency
from depthfold.support.text import one_line


def load(library: str, extra: str) -> ModuleType:
    """An optional library, or the command that installs it."""
    try:
        return importlib.import_module(library)
    except ImportError as error:
        # A library that is there and does not load (a missing driver) must not read as one that is not there.
        absent = isinstance(error, ModuleNotFoundError) and error.name == library.partition(".")[0]
        found = f"{library} is not installed" if absent else f"{library} does not load: {one_line(error)}"
        raise MissingDependency(f"{found}. Install it with: pip install depthfold[{extra}]") from error
