"""Settings from options, from the user's TOML file and from config.toml, which keeps them in the run folder."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from depthfold.errors import InvalidValue, RunError
from depthfold.settings.settings import Settings, declarations
from depthfold.store import RunFolder
from depthfold.store.run_folder import CONFIG

HEADER = "# The settings of this run. Later commands need only --run; their options override these.\n"


def gather(
    options: Mapping[str, Any], file: str | Path | None, *, needs: Collection[str], uses: Collection[str]
) -> Settings:
    """Return the settings of a command. Options override the file, and the file overrides the run's config.toml."""
    table = _anchored(options, Path.cwd())
    if file is not None:
        path = Path(file).expanduser().absolute()
        table = _anchored(_read(path), path.parent) | table
    if isinstance(run := table.get("run"), str) and (kept := Path(run) / CONFIG).exists():
        table = _anchored(_read(kept), kept.absolute().parent) | table
    return Settings.checked(table, needs=needs, uses=uses)


def keep(settings: Settings, *, if_new: bool = False) -> None:
    """Write the settings to config.toml in the run folder.

    With `if_new` only if there is none yet: the old settings stay until a command has succeeded with the new ones.
    """
    folder, table = RunFolder.open(settings.need("run")), dataclasses.asdict(settings)
    del table["run"]  # the folder of the file
    text = HEADER + tomli_w.dumps({name: value for name, value in table.items() if value is not None})
    path = folder.path / CONFIG
    if not path.exists() or (not if_new and path.read_text(encoding="utf-8") != text):
        folder.write_text(CONFIG, text)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(f"The settings in {path} cannot be read: {error.strerror}. Check the path.") from error
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError are subclasses
        raise InvalidValue(
            f"{path} is not valid TOML: {error}. Correct the file, or delete it and give the options again."
        ) from error


def _anchored(table: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """Return the table with absolute paths, because the next command may run in another folder."""
    known = declarations()
    return {
        name: known[name].anchor(value, base) if name in known and isinstance(value, str) else value
        for name, value in table.items()
    }
