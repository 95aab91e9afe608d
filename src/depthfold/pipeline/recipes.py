"""Recipes as settings name them: a preset, a file, or a table."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from depthfold.errors import InvalidValue
from depthfold.support.document import decode_fields
from depthfold.training import Recipe, preset

SUFFIXES = (".toml", ".json")


def recipe_of(given: str | Mapping[str, Any]) -> Recipe:
    """A preset by name, a TOML or JSON file, or a table of a recipe's fields. A table may begin with a preset:
    {preset = "quick", steps = 100}."""
    if isinstance(given, Mapping):
        return _from_table(given)
    path = Path(given).expanduser()
    return _from_table(_read(path)) if path.suffix in SUFFIXES else preset(given)


def _from_table(table: Mapping[str, Any]) -> Recipe:
    fields = dict(table)
    if "format" in fields:  # a document, as Recipe.dumps() writes it
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
    except ValueError as error:  # TOMLDecodeError, JSONDecodeError and UnicodeDecodeError all are
        raise InvalidValue(
            f"The recipe {path} cannot be read: {error}. Expected a table of a recipe's fields."
        ) from error
    if not isinstance(data, dict):
        raise InvalidValue(f"The recipe {path} must be a table of a recipe's fields, found {type(data).__name__}.")
    return data
