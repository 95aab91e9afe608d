"""Settings from options, from the user's TOML file and from config.toml, which keeps them in the run folder."""

from __future__ import annotations

import contextlib
import dataclasses
import tomllib
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from depthfold.errors import InvalidValue, RunError
from depthfold.settings.settings import Settings, declarations
from depthfold.store import RunFolder
from depthfold.store.run_folder import CONFIG, GIVEN, IMPORTANCE, LATENCY

HEADER = "# The settings of this run. Later commands need only --run; their options override these.\n"
_MEASURING = frozenset(("method", "importance_recipe", "reinit"))  # how importances are measured


def gather(
    options: Mapping[str, Any], file: str | Path | None, *, needs: Collection[str], uses: Collection[str]
) -> Settings:
    """Return the settings of a command. Options override the file, and the file overrides the run's config.toml.

    Options that say how importances are measured also override a table of importances that was given before.
    """
    table = _anchored(options, Path.cwd())
    if not _MEASURING.isdisjoint(options):
        table.setdefault("importance", None)
    if file is not None:
        path = Path(file).expanduser().absolute()
        table = _anchored(_read(path), path.parent) | table
    if isinstance(run := table.get("run"), str) and (kept := Path(run) / CONFIG).exists():
        earlier = _anchored(_read(kept), kept.absolute().parent)
        table = _with_copies({name: earlier[name] for name in earlier if name not in table}, Path(run)) | table
    given = {name: value for name, value in table.items() if value is not None}
    return Settings.checked(given, needs=needs, uses=uses)


def keep(settings: Settings, *, if_new: bool = False) -> None:
    """Write the settings to config.toml in the run folder. With `if_new` only if there is none yet."""
    folder, text = RunFolder.open(settings.need("run")), _text(settings)
    known = _kept(folder.path)
    if known is None or (not if_new and known != text):
        folder.write_text(CONFIG, text)


@contextlib.contextmanager
def restored_after_errors(settings: Settings) -> Iterator[None]:
    """Restore the earlier settings of the run if the block has replaced them and then fails.

    An interrupted command keeps its settings, so that --run alone resumes it.
    """
    run = settings.run
    earlier = None if run is None else _kept(Path(run))
    try:
        yield
    except Exception:
        if run is not None and earlier is not None and _kept(Path(run)) == _text(settings) != earlier:
            with contextlib.suppress(RunError):  # the first error is the one to report
                RunFolder.open(run).write_text(CONFIG, earlier)
        raise


def _with_copies(kept: Mapping[str, Any], run: Path) -> dict[str, Any]:
    """Return the kept settings with the run's copies of given tables whose files are gone."""
    copies: dict[str, Any] = {}
    for name, copy in (("latency", LATENCY), ("importance", IMPORTANCE)):
        path = kept.get(name)
        if isinstance(path, str) and not Path(path).is_file() and GIVEN in (RunFolder(run).made_from(copy) or {}):
            copies[name] = str(run / copy)
            warnings.warn(
                f"The {name} table {path} is gone, so its copy in the run folder is used: {run / copy}.", stacklevel=2
            )
    return {**kept, **copies}


def _text(settings: Settings) -> str:
    table = dataclasses.asdict(settings)
    del table["run"]  # the folder of the file
    return HEADER + tomli_w.dumps({name: value for name, value in table.items() if value is not None})


def _kept(run: Path) -> str | None:
    path = run / CONFIG
    return path.read_text(encoding="utf-8") if path.exists() else None


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
    """Return the table with absolute paths and the contents of recipes: the next command may run in another folder."""
    known = declarations()
    return {
        name: known[name].anchor(value, base) if name in known and isinstance(value, str) else value
        for name, value in table.items()
    }
