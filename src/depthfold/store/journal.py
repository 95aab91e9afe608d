"""An append-only journal that survives a kill at any byte.

One JSON object per line. The first line is the header: the format, the version, and what the journal was made from. A
line counts once its line break is on disk: an incomplete last line was left by a killed process, and is dropped. A
damaged line before it cannot come from a kill, and is an error.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from depthfold.errors import InvalidValue, JournalError
from depthfold.store.files import close_locked, lock_open, sync
from depthfold.support.coerce import as_path
from depthfold.support.text import one_line

FORMAT, VERSION = "depthfold.journal", 1

Record = dict[str, Any]

_START = f'{{"format":"{FORMAT}"'.encode()  # of every header


class HeaderMismatch(JournalError):
    """The journal was made from other inputs."""

    def __init__(self, path: Path, found: Record, expected: Record) -> None:
        self.path, self.found, self.expected = path, found, expected
        super().__init__(
            f"The journal {path} was made from other inputs ({'; '.join(differences(found, expected))}). Give the "
            "same as before, use another run folder, or delete the journal to start again."
        )


class Journal:
    """An open journal: iterate over its records, append to it, and close it (or use it in a `with`).

    A subclass gives the records a meaning in `take`. Without a path nothing is written.
    """

    def __init__(self, path: str | Path | None, header: Mapping[str, Any]) -> None:
        """Create the journal, or continue the one that is there if it has the same header."""
        self.path = None if path is None else Path(path)
        self._records: list[Record] = []
        self._file = -1
        self._stack = contextlib.ExitStack()
        if self.path is not None:
            try:
                self._open(self.path, _plain(header))
                self._replay(self.path)
            except BaseException:
                self.close()
                raise

    def take(self, record: Record) -> None:
        """Process a record that was read. An error that this raises is reported with the line of the record."""

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record. When this returns, it is on disk; if it raises, the journal is unchanged."""
        if self.path is None:
            return
        plain = _plain(record)
        if self._file < 0:
            raise JournalError(f"The journal {self.path} is closed; open it again to append to it.")
        size = os.fstat(self._file).st_size
        try:
            with _journal_errors(self.path, "written"):
                _write(self._file, plain)
        except BaseException:
            with contextlib.suppress(OSError):  # an incomplete line on a full disk is dropped on the next open
                os.ftruncate(self._file, size)
            raise
        self._records.append(plain)

    def __iter__(self) -> Iterator[Record]:
        return iter(tuple(self._records))

    def __len__(self) -> int:
        return len(self._records)

    def close(self) -> None:
        self._stack.close()
        self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, path: Path, expected: Record) -> None:
        with _journal_errors(path, "opened"):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._stack.callback(close_locked, self._file, os.getpid())
        lock_open(self._file, path, JournalError)
        with _journal_errors(path, "read"):
            lines, whole = _lines(path, path.read_bytes())
        if lines:
            _check_header(path, lines[0], expected)
        with _journal_errors(path, "written"):
            os.ftruncate(self._file, whole)  # drop an incomplete line: the next one must not continue it
            if not lines:
                _write(self._file, {"format": FORMAT, "version": VERSION, "header": expected})
                sync(path.parent)  # a new file is on disk only when its folder is
        self._records = lines[1:]

    def _replay(self, path: Path) -> None:
        for number, record in enumerate(self._records, start=2):  # the header is line 1
            try:
                self.take(record)
            except (LookupError, TypeError, ValueError) as error:
                missing = f"it has no {error}" if isinstance(error, KeyError) else one_line(error).rstrip(".")
                raise JournalError(
                    f"{path}, line {number} is not a record of this journal: {missing}; found {_dumps(record)[:60]!r}. "
                    "Delete that line, and its work is done again; or restore the file."
                ) from error


def journal_in(run: str | Path | None, name: str) -> Path | None:
    """Return the path of a journal in a run folder; None without a run folder."""
    return None if run is None else as_path("The run folder", run, InvalidValue) / name


def differences(found: Mapping[str, Any], expected: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield a text for each value that differs between two documents."""
    for name in {**found, **expected}:
        there, here = found.get(name), expected.get(name)
        if isinstance(there, Mapping) and isinstance(here, Mapping):
            yield from differences(there, here, f"{prefix}{name}.")
        elif there != here:
            found_text, expected_text = ("none" if value is None else str(value) for value in (there, here))
            yield f"{prefix}{name}: {found_text} there, {expected_text} here"


def _lines(path: Path, data: bytes) -> tuple[list[Record], int]:
    """Return the whole lines, and the number of bytes that they take."""
    whole = data.rfind(b"\n") + 1
    if not whole and data[: len(_START)] != _START[: len(data)]:  # not an incomplete header, so a file of the user
        raise JournalError(f"{path} is not a journal: it begins with {data[:30]!r}. Use another run folder.")
    lines: list[Record] = []
    for number, line in enumerate(data[:whole].split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise JournalError(
                f"{path}, line {number}: expected a JSON object, found {line[:60]!r}. The file is damaged in the "
                "middle; restore it, or delete it to start again."
            )
        lines.append(record)
    return lines, whole


def _check_header(path: Path, line: Record, expected: Record) -> None:
    found = line.get("format"), line.get("version")
    if found != (FORMAT, VERSION) or not isinstance(line.get("header"), dict):
        raise JournalError(
            f"{path} is not a journal that this depthfold reads: its first line has format {found[0]!r}, version "
            f"{found[1]!r}; expected {FORMAT!r}, version {VERSION}. Use another run folder."
        )
    if line["header"] != expected:
        raise HeaderMismatch(path, line["header"], expected)


def _write(file: int, record: Record) -> None:
    data = memoryview(_dumps(record).encode() + b"\n")
    while data:  # a write may take less than it is given
        data = data[os.write(file, data) :]
    os.fsync(file)


def _plain(record: Mapping[str, Any]) -> Record:
    """Return the record as it will be read back: tuples as lists, and so on."""
    return dict(json.loads(_dumps(record)))


def _dumps(record: Mapping[str, Any]) -> str:
    try:
        return json.dumps(record, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise JournalError(f"A record of a journal must be plain JSON: {error}.") from error


@contextlib.contextmanager
def _journal_errors(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise JournalError(
            f"The journal {path} cannot be {what}: {error.strerror}. Check the folder and its free space, or use "
            "another run folder."
        ) from error
