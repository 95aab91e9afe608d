"""The checks of the settings, one for each; what is wrong is said in a sentence."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from depthfold.backends import get
from depthfold.core import Budget
from depthfold.core.coerce import as_text, as_whole
from depthfold.core.wording import did_you_mean
from depthfold.errors import DepthfoldError, InvalidValue
from depthfold.pipeline.data import split_data
from depthfold.pipeline.executors import executor_of
from depthfold.pipeline.preflight import expect_exports, expect_space
from depthfold.pipeline.recipes import recipe_of
from depthfold.pipeline.user_file import names_file, split_name

MOST = 2**28  # numbers of an image: a gibibyte, far above what any network is run on
MISSING = {
    "run": "There is no run folder: name one with --run DIR; it is made if it is not there",
    "model": "There is no model: name torchvision:NAME, timm:NAME or file.py:function",
    "data": "There is no data: name it with --data, as cifar10:PATH, imagefolder:PATH or file.py:function",
    "target": "There is no target: name the runtime to measure on with --target onnxruntime, for example",
    "budget": "There is no budget: say how long the network may take with --budget 60%, 12.5ms or 1.6x",
}


def image_of(text: str) -> tuple[int, int, int]:
    """Channels, height and width of "3x224x224"."""
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
        raise InvalidValue(f"The input {text!r} cannot be read. Write channels x height x width: 3x224x224.")
    channels, height, width = map(int, parts)
    if channels * height * width > MOST:
        raise InvalidValue(
            f"The input {text!r} is too large: an image has at most {MOST} values, channels x height x width. Write "
            "the size in which the network will run: 3x224x224."
        )
    return channels, height, width


def problems(
    table: Mapping[str, Any], known: Collection[str], needs: Collection[str], uses: Collection[str]
) -> Iterator[str]:
    """What is wrong with a table of settings: names that are not known, what is needed and missing, what is used and
    makes no sense."""
    for key in table:
        if key not in known:
            yield f"There is no setting {key!r}. {did_you_mean(key, known)}Known are {', '.join(known)}."
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


def _recipe(value: Any) -> None:
    if not isinstance(value, str | Mapping):
        raise InvalidValue(f"A recipe is the name of a preset, a file or a table, found {value!r}.")
    recipe_of(value)


def _alpha(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidValue(f"The setting 'alpha' must be a number (the paper uses 1.2 to 1.8), found {value!r}.")


def _flag(name: str) -> Callable[[Any], None]:
    def check(value: Any) -> None:
        if not isinstance(value, bool):
            raise InvalidValue(f"The setting {name!r} must be true or false, found {value!r}.")

    return check


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
    "space": expect_space,
    "target": _then(_text("target"), get),
    "budget": Budget.parse,
    "trainings": _recipe,
    "importance": _then(_text("importance"), _file),
    "executor": _then(_text("executor"), executor_of),
    "alpha": _alpha,
    "recipe": _recipe,
    "afresh": _flag("afresh"),
    "distil": _flag("distil"),
    "export": _then(_texts("export"), expect_exports),
}
