"""config.toml: settings from a file of the user's, and what a run was told, kept in its folder."""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from depthfold.errors import InvalidValue, RunError
from depthfold.pipeline.data import KINDS
from depthfold.pipeline.recipes import SUFFIXES
from depthfold.pipeline.settings import Settings
from depthfold.pipeline.user_file import names_file
from depthfold.pipeline.weights import is_weights_file
from depthfold.store import RunFolder
from depthfold.store.run_folder import CONFIG

HEADER = "# What depthfold was told. The next command on this run needs only --run; its options win over these.\n"


def gather(
    options: Mapping[str, Any], file: str | Path | None, *, needs: Collection[str], uses: Collection[str]
) -> Settings:
    """The settings of a command: its options, before those of the file, before what the run was told earlier."""
    told = _anchored(options, Path.cwd())
    if file is not None:
        path = Path(file).expanduser().absolute()
        told = _anchored(_read(path), path.parent) | told
    if isinstance(run := told.get("run"), str):
        kept = Path(run) / CONFIG
        told = (_anchored(_read(kept), kept.absolute().parent) if kept.exists() else {}) | told
    return Settings.checked(told, needs=needs, uses=uses)


def keep(settings: Settings) -> None:
    """Write the settings into the run's folder, unless they are there."""
    fields = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    del fields["run"]  # it is where this file lies
    folder, text = RunFolder.open(settings.folder), HEADER + as_toml(fields)
    path = folder.path / CONFIG
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        folder.write_text(CONFIG, text)


def keep_first(settings: Settings) -> None:
    """The same, unless the run was told something before: that stays until a command has succeeded with the new."""
    if not (RunFolder.open(settings.folder).path / CONFIG).exists():
        keep(settings)


def as_toml(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> str:
    """Plain values first, then the tables; None is left out, as TOML has no word for it. `path` is where the table
    stands among others."""
    told = {key: value for key, value in table.items() if value is not None}
    lines = [f"{_key(key)} = {_value(value)}" for key, value in told.items() if not isinstance(value, Mapping)]
    for key, value in told.items():
        if isinstance(value, Mapping):
            here = *path, key
            lines += ["", f"[{'.'.join(map(_key, here))}]", as_toml(value, here).rstrip("\n")]
    return "\n".join(lines) + "\n"


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(value: Any) -> str:
    """Whatever a TOML file may hold: what a command does not use is kept as it was found."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {_value(one)}" for key, one in value.items() if one is not None) + "}"
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, float):
        return repr(value)  # inf and nan are words of TOML, and not of JSON
    # JSON writes whole numbers, flags and quoted text as TOML does; only DEL, which JSON leaves, TOML forbids.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(f"The settings in {path} cannot be read: {error.strerror}. Check the path.") from error
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError both are
        raise InvalidValue(
            f"The settings in {path} are no TOML: {error}. Mend the file, or delete it and give the options again."
        ) from error


def _anchored(table: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """The table with its paths made absolute: the next command may be run in another folder."""
    return {key: _anchor(key, value, base) for key, value in table.items() if value is not None}


def _anchor(key: str, value: Any, base: Path) -> Any:
    if not isinstance(value, str):
        return value
    kind, colon, place = value.partition(":")
    if key in ("model", "data") and names_file(value):
        return _absolute(value, base)
    if key == "data" and kind in KINDS and place:
        return f"{kind}{colon}{_absolute(place, base)}"
    is_file = (key == "weights" and is_weights_file(_absolute(value, base))) or (
        key in ("recipe", "trainings") and Path(value).suffix in SUFFIXES
    )
    return _absolute(value, base) if is_file or key in ("run", "importance") else value


def _absolute(text: str, base: Path) -> str:
    return str((base / Path(text).expanduser()).absolute())
