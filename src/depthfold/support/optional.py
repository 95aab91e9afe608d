"""Import of optional libraries when they are first used."""

from __future__ import annotations

import importlib
from types import ModuleType

from depthfold.errors import MissingDependency
from depthfold.support.text import one_line


def load(library: str, extra: str) -> ModuleType:
    """Import an optional library. Raise MissingDependency with the command that installs it."""
    try:
        return importlib.import_module(library)
    except ImportError as error:
        # A library that is installed but does not load (for example without a driver) is not reported as missing.
        absent = isinstance(error, ModuleNotFoundError) and error.name == library.partition(".")[0]
        found = f"{library} is not installed" if absent else f"{library} does not load: {one_line(error)}"
        raise MissingDependency(f"{found}. Install it with: pip install depthfold[{extra}]") from error
