"""Everything that a command can be told, checked together: all problems are reported at once."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, get_args

from depthfold.backends import get
from depthfold.core import Budget
from depthfold.core.coerce import as_text, as_whole
from depthfold.core.space import Space
from depthfold.errors import DepthfoldError, InvalidValue
from depthfold.exporting.export import FORMATS
from depthfold.pipeline.data import split_data
from depthfold.pipeline.executors import executor_of
from depthfold.pipeline.recipes import recipe_of
from depthfold.pipeline.user_file import names_file, split_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a run is told, in the words of the command line and of config.toml. Paths are absolute."""

    run: str | None = None
    model: str | None = None
    weights: str | None = None
    data: str | None = None
    input: str | None = None
    batch: int = 1
    ignore: tuple[str, ...] = ()
    at: str | None = None
    space: Space = "paper"
    target: str | None = None
    budget: str | None = None
    trainings: str | Mapping[str, Any] = "importance"
    importance: str | None = None
    executor: str = "inline"
    alpha: float | None = None
    recipe: str | Mapping[str, Any] = "quick"
    distil: bool = True
    export: tuple[str, ...] = ("model.onnx",)

    @classmethod
    def checked(cls, table: Mapping[str, Any], *, needs: Collection[str], uses: Collection[str]) -> Self:
        """The settings of a table. Those that are needed must be there, and those that are used must make sense; the
        others belong to other commands, which will look at them."""
        problems = tuple(_problems(table, needs, {*uses, *needs}))
        if len(problems) == 1:
            raise InvalidValue(problems[0])
        if problems:
            listed = "\n".join(f"  - {problem}" for problem in problems)
            raise InvalidValue(f"{len(problems)} settings cannot be used:\n{listed}")
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in table.items()
        }
        return cls(**fields)

    @property
    def image(self) -> tuple[int, int, int] | None:
        """Channels, height and width of `input`."""
        return None if self.input is None else image_of(self.input)

    @property
    def folder(self) -> str:
        """The run folder of a command that needs one."""
        return given(self.run, "run")


MISSING = {
    "run": "There is no run folder: name one with --run DIR; it is made if it is not there",
    "model": "There is no model: name torchvision:NAME, timm:NAME or file.py:function",
    "data": "There is no data: name it with --data, as cifar10:PATH, imagefolder:PATH or file.py:function",
    "target": "There is no target: name the runtime to measure on with --target onnxruntime, for example",
    "budget": "There is no budget: say how long the network may take with --budget 60%, 12.5ms or 1.6x",
}


def given(value: str | None, name: str) -> str:
    """The setting, or an error that says how to give it."""
    if value is None:
        raise InvalidValue(f"{MISSING[name]}.")
    return value


def image_of(text: str) -> tuple[int, int, int]:
    """Channels, height and width of "3x224x224"."""
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
        raise InvalidValue(f"The input {text!r} cannot be read. Write channels x height x width: 3x224x224.")
    channels, height, width = map(int, parts)
    return channels, height, width


def _problems(table: Mapping[str, Any], needs: Collection[str], uses: Collection[str]) -> Iterator[str]:
    known = [field.name for field in dataclasses.fields(Settings)]
    for key in table:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            yield f"There is no setting {key!r}.{hint} Known are {', '.join(known)}."
    for name in known:
        if name in table and name in uses:
            try:
                _CHECKS[name](table[name])
            except DepthfoldError as error:
                yield str(error)
        elif name in needs:
            yield f"{MISSING[name]}."


def _text(name: str) -> Callable[[Any], object]:
    return lambda value: as_text(f"The setting {name!r}", value, InvalidValue)


def _texts(name: str) -> Callable[[Any], None]:
    def check(value: Any) -> None:
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise InvalidValue(f"The setting {name!r} must be a list of texts, found {value!r}.")

    return check


def _then(*checks: Callable[[Any], object]) -> Callable[[Any], None]:
    """The first ones say whether the last one can be asked."""

    def check(value: Any) -> None:
        for one in checks:
            one(value)

    return check


def _model(text: str) -> None:
    if names_file(text):
        path, _ = split_name(text, "The model")
        if not path.is_file():
            raise InvalidValue(f"The model {text!r} is missing: there is no file {path}. Check the path.")


def _data(text: str) -> None:
    if not names_file(text):
        split_data(text)
        return
    path, _ = split_name(text, "The data")
    if not path.is_file():
        raise InvalidValue(f"The data {text!r} is missing: there is no file {path}. Check the path.")


def _space(value: Any) -> None:
    if value not in get_args(Space):
        raise InvalidValue(f"There is no search space {value!r}; there are {' and '.join(map(repr, get_args(Space)))}.")


def _recipe(value: Any) -> None:
    if not isinstance(value, str | Mapping):
        raise InvalidValue(f"A recipe is the name of a preset, a file or a table, found {value!r}.")
    recipe_of(value)


def _alpha(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidValue(f"The setting 'alpha' must be a number (the paper uses 1.2 to 1.8), found {value!r}.")


def _flag(value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidValue(f"The setting 'distil' must be true or false, found {value!r}.")


def _exports(value: Any) -> None:
    for name in value:
        if Path(name).suffix not in FORMATS:
            raise InvalidValue(f"The file {name!r} cannot be exported: its suffix must be one of {', '.join(FORMATS)}.")


def _file(text: str) -> None:
    if not Path(text).is_file():
        raise InvalidValue(f"There is no importance table {text}. Check the path of --importance.")


_CHECKS: dict[str, Callable[[Any], object]] = {
    **{name: _text(name) for name in ("run", "weights", "at")},
    "model": _then(_text("model"), _model),
    "data": _then(_text("data"), _data),
    "input": _then(_text("input"), image_of),
    "batch": lambda value: as_whole("The setting 'batch'", value, InvalidValue),
    "ignore": _texts("ignore"),
    "space": _space,
    "target": _then(_text("target"), get),
    "budget": Budget.parse,
    "trainings": _recipe,
    "importance": _then(_text("importance"), _file),
    "executor": _then(_text("executor"), executor_of),
    "alpha": _alpha,
    "recipe": _recipe,
    "distil": _flag,
    "export": _then(_texts("export"), _exports),
}
