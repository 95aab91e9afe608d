"""Data and recipes by name: cifar10:PATH, imagefolder:PATH or file.py:function; a preset, a file or a table."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthfold.errors import DataError, InvalidValue
from depthfold.settings.user_file import call, check_file, find_in_file, names_file
from depthfold.support.document import decode_fields
from depthfold.support.text import did_you_mean
from depthfold.training import Recipe, preset

if TYPE_CHECKING:
    from depthfold.training import Task

# The constructor of ClassificationTask for each kind of dataset.
DATASETS = {
    "cifar10": "cifar10",
    "cifar100": "cifar100",
    "fashion-mnist": "fashion_mnist",
    "imagefolder": "image_folder",
}
RECIPE_SUFFIXES = (".toml", ".json")


def make_task(text: str, size: tuple[int, int] | None = None) -> Task:
    """Make the task. Its images are resized to `size`, unless it comes from the user's file."""
    from depthfold.tasks import ClassificationTask
    from depthfold.training import Task

    if not names_file(text):
        kind, path = _split(text)
        task: Task = getattr(ClassificationTask, DATASETS[kind])(path, size=size)
        return task
    found = find_in_file(text, "The data")
    made = found if isinstance(found, Task) and not isinstance(found, type) else call(found, text, "The data")
    if not isinstance(made, Task):
        raise DataError(
            f"The data {text!r} must be a function that returns a task, an object with the methods loss, score and "
            f"steps_per_epoch; it returned {made!r:.80}. df.ClassificationTask.tensors(train=(images, labels), "
            "test=(images, labels)) makes one."
        )
    return made


def check_image_size(task: Task, size: tuple[int, int]) -> None:
    """Raise DataError if the images have another size: latencies and scores would be of different sizes."""
    from depthfold.tasks import ClassificationTask

    if not isinstance(task, ClassificationTask):
        return
    height, width = task.example().shape[2:]
    if (height, width) != size:
        raise DataError(
            f"The images of the data are {height}x{width}, but --input asks for {size[0]}x{size[1]}. Images from a "
            "function in a file are not resized: leave out --input, or return images of that size."
        )


def check_data(text: str) -> None:
    """Raise DataError or InvalidValue if the text does not name data that exist."""
    if names_file(text):
        check_file(text, "The data")
    else:
        _split(text)


def _split(text: str) -> tuple[str, Path]:
    """Return kind and path of "kind:PATH"; the path must exist."""
    kind, colon, place = text.partition(":")
    if kind not in DATASETS or not colon or not place:
        hint = did_you_mean(kind, DATASETS, lambda close: f"{close}:{place or 'PATH'}")
        forms = ", ".join(f"{kind}:PATH" for kind in DATASETS)
        raise DataError(f"The data {text!r} is not valid. {hint}Write {forms} or file.py:function.")
    path = Path(place).expanduser().absolute()
    if not path.is_dir():
        raise DataError(
            f"The data {text!r} is missing: there is no folder {path}. Download it there, or give another path."
        )
    return kind, path


def make_recipe(given: str | Mapping[str, Any]) -> Recipe:
    """Make a recipe from the name of a preset, a TOML or JSON file, or a table of its fields. A table may start from
    a preset: {preset = "quick", steps = 100}."""
    if isinstance(given, Mapping):
        return _from_table(given)
    path = Path(given).expanduser()
    return _from_table(_read(path)) if path.suffix in RECIPE_SUFFIXES else preset(given)


def _from_table(table: Mapping[str, Any]) -> Recipe:
    fields = dict(table)
    if "format" in fields:  # a document written by Recipe.dumps()
        return Recipe.from_json(fields)
    if (name := fields.pop("preset", None)) is not None:
        return preset(name).replace(**fields)
    recipe: Recipe = decode_fields(Recipe, fields, "recipe")
    return recipe


def _read(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        data = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise InvalidValue(f"The recipe {path} cannot be read: {error.strerror}. Check the path.") from error
    except ValueError as error:  # TOMLDecodeError, JSONDecodeError and UnicodeDecodeError are subclasses
        raise InvalidValue(
            f"The recipe {path} cannot be read: {error}. It must be a table of a recipe's fields."
        ) from error
    if not isinstance(data, dict):
        raise InvalidValue(f"The recipe {path} must be a table of a recipe's fields, found {type(data).__name__}.")
    return data
