"""Imports on first use: of optional libraries, and of the public names of a package."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

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
        raise MissingDependency(f'{found}. In a clone of depthfold, run: pip install -e ".[{extra}]"') from error


def lazy_getattr(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that imports its public names on first use.

    `modules` maps a module of the package to the names that it defines, separated by spaces.
    """
    homes = {name: module for module, names in modules.items() for name in names.split()}

    def getattribute(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(homes))}")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    return getattribute
