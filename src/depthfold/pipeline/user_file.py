"""A user's own code in one file: "file.py:function"."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from depthfold.errors import InvalidValue
from depthfold.support.text import did_you_mean, one_line


def names_file(text: str) -> bool:
    """Whether the text means a function in a file, and not a name that we know."""
    return text.endswith(".py") or ".py:" in text


def split_name(text: str, what: str) -> tuple[Path, str]:
    """The file and the function of "file.py:function"."""
    before, _, name = text.rpartition(".py:")
    if not before or not name.isidentifier():
        raise InvalidValue(f"{what} {text!r} lacks the name of a function. Write file.py:function.")
    return Path(before + ".py").expanduser().absolute(), name


def find_in_file(text: str, what: str) -> Any:
    """What "file.py:name" means: a function, as a rule."""
    path, name = split_name(text, what)
    module = _load(path, what)
    if not hasattr(module, name):
        known = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        hint = did_you_mean(name, known)
        raise InvalidValue(f"{path} has no {name!r}. {hint}It has {', '.join(known) or 'nothing to call'}.")
    return getattr(module, name)


def call(function: Any, text: str, what: str) -> Any:
    """What the function returns; whatever it raises is told as its own error."""
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise InvalidValue(f"{what} {text!r} {_raised(error)}") from error


def _load(path: Path, what: str) -> ModuleType:
    """The file as a module, read once: the model and the data may be functions of the same file."""
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise InvalidValue(f"{what}: there is no file {path}. Check the path, and write file.py:function.")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InvalidValue(f"{what}: {path} cannot be read as Python.")
    module = importlib.util.module_from_spec(spec)
    if sys.path[0] != str(path.parent):  # as for a script: the files beside it come before all others
        sys.path.insert(0, str(path.parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise InvalidValue(f"{what}: {path} {_raised(error)}") from error
    _send_along(module)
    return module


def _raised(error: BaseException) -> str:
    if isinstance(error, SystemExit):  # it would end the command without a word
        return f"ended the program with sys.exit({error.code!r}). Put what only a script does under __main__."
    return f"raised {type(error).__name__}: {one_line(error)}"


def _send_along(module: ModuleType) -> None:
    """Worker processes cannot import the file by our name for it, so its functions travel with the jobs."""
    for library in ("cloudpickle", "ray.cloudpickle"):
        # Ray is slow to import, and has a register of its own: where it is used it was imported before (executors.py).
        if library == "cloudpickle" or library in sys.modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(library).register_pickle_by_value(module)
