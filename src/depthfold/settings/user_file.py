"""Functions in the user's own file: "file.py:function"."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from depthfold.errors import InvalidValue
from depthfold.support.digest import digest
from depthfold.support.text import did_you_mean, one_line


def names_file(text: str) -> bool:
    """Return True if the text has the form "file.py:function"."""
    return text.endswith(".py") or ".py:" in text


def check_file(text: str, what: str) -> None:
    """Raise InvalidValue if the text does not name a function in a file that exists."""
    path, _ = _split(text, what)
    if not path.is_file():
        raise InvalidValue(f"{what} {text!r} is missing: there is no file {path}. Check the path.")


def check_model_file(text: str) -> None:
    """Check the file of a model. Other names are checked when the model is made, because the libraries load slowly."""
    if names_file(text):
        check_file(text, "The model")


def find_in_file(text: str, what: str) -> Any:
    """Return the object, usually a function, that "file.py:name" names."""
    check_file(text, what)
    path, name = _split(text, what)
    module = _load(path, what)
    if not hasattr(module, name):
        known = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        hint = did_you_mean(name, known)
        raise InvalidValue(f"{path} has no {name!r}. {hint}It has {', '.join(known) or 'no functions'}.")
    return getattr(module, name)


def call(function: Any, text: str, what: str) -> Any:
    """Call the user's function. Raise InvalidValue with whatever it raises."""
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise InvalidValue(f"{what} {text!r} {_describe(error)}") from error


def _split(text: str, what: str) -> tuple[Path, str]:
    before, _, name = text.rpartition(".py:")
    if not before or not name.isidentifier():
        raise InvalidValue(f"{what} {text!r} does not name a function. Write file.py:function.")
    return Path(before + ".py").expanduser().absolute(), name


def _load(path: Path, what: str) -> ModuleType:
    """Import the file once: the model and the data may be functions of the same file."""
    name = f"{path.stem}_{digest(str(path))}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # its suffix is .py
    module = importlib.util.module_from_spec(spec)
    if sys.path[0] != str(path.parent):  # as for a script, modules beside the file take precedence
        sys.path.insert(0, str(path.parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise InvalidValue(f"{what}: {path} {_describe(error)}") from error
    _pickle_by_value(module)
    return module


def _describe(error: BaseException) -> str:
    if isinstance(error, SystemExit):  # it would end the command silently
        return f"called sys.exit({error.code!r}). Put code that only a script runs under __main__."
    return f"raised {type(error).__name__}: {one_line(error)}"


def _pickle_by_value(module: ModuleType) -> None:
    """Send the module's functions with the jobs: worker processes cannot import it by our name for it."""
    for library in ("cloudpickle", "ray.cloudpickle"):
        # Ray imports slowly and has its own registry. If it is used, executors.py has already imported it.
        if library == "cloudpickle" or library in sys.modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(library).register_pickle_by_value(module)
