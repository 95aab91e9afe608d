"""An append-only journal that survives a kill at any byte.

One JSON object per line. The first line is the header: the format, the version and a document that says what the
journal belongs to. A line counts once its line break is on disk: a torn last line is what a killed process left, and is
dropped. A damaged line before the last cannot come from a kill, and is an error.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from depthfold.errors import JournalError
from depthfold.store.files import sync
from depthfold.support.text import one_line

FORMAT, VERSION = "depthfold.journal", 1

Record = dict[str, Any]

_START = f'{{"format":"{FORMAT}"'.encode()  # of every header


class HeaderMismatch(JournalError):
    """The journal belongs to something else. `found` and `expected` are both documents, for their difference."""

    def __init__(self, path: Path, found: Record, expected: Record) -> None:
        self.path, self.found, self.expected = path, found, expected
        super().__init__(
            f"The journal {path} belongs to something else.\n  found:    {_dumps(found)}\n"
            f"  expected: {_dumps(expected)}\nContinue in another folder, or delete the file to start again."
        )


class Journal:
    """An open journal: iterate over its records, append to it, close it (or use it in a `with`)."""

    __slots__ = ("_file", "_records", "path")

    def __init__(self, path: Path, file: int, records: list[Record]) -> None:
        self.path, self._file, self._records = path, file, records

    @classmethod
    def open(cls, path: str | Path, header: Mapping[str, Any]) -> Self:
        """Create the journal, or go on with the one that is there if it has the same header."""
        path, expected = Path(path), _plain(header)
        with _clearly(path, "opened"):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            _lock(path, file)
            with _clearly(path, "read"):
                lines, whole = _lines(path, path.read_bytes())
            if lines:
                _check_header(path, lines[0], expected)
            with _clearly(path, "written"):
                os.ftruncate(file, whole)  # the torn line, if any: what comes next must not be glued to it
                if not lines:
                    _write(file, {"format": FORMAT, "version": VERSION, "header": expected})
                    sync(path.parent)  # a new file is on disk only when its folder is
        except BaseException:
            os.close(file)
            raise
        return cls(path, file, lines[1:])

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record. When this returns it is on disk; if it raises, the journal is as it was."""
        if self._file < 0:
            raise JournalError(f"The journal {self.path} is closed; open it again to append to it.")
        plain = _plain(record)
        size = os.fstat(self._file).st_size
        try:
            with _clearly(self.path, "written"):
                _write(self._file, plain)
        except BaseException:
            with contextlib.suppress(OSError):  # a half line on a full disk is a torn tail: dropped when opened again
                os.ftruncate(self._file, size)
            raise
        self._records.append(plain)

    def replay(self, take: Callable[[Record], None]) -> None:
        """Hand each record to `take`, in order; one that it cannot use is an error that names its line, and the
        journal is closed: nobody else may have it yet, and its lock must not outlive it."""
        for number, record in enumerate(self._records, start=2):  # the header is line 1
            try:
                take(record)
            except (LookupError, TypeError, ValueError) as error:
                self.close()
                missing = f"it has no {error}" if isinstance(error, KeyError) else one_line(error).rstrip(".")
                raise JournalError(
                    f"{self.path}, line {number} is no record of this journal: {missing}; found "
                    f"{_dumps(record)[:60]!r}. Delete that line, and what it stood for is done again; or restore the "
                    "file."
                ) from error

    def __iter__(self) -> Iterator[Record]:
        return iter(tuple(self._records))

    def __len__(self) -> int:
        return len(self._records)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)  # gives the lock back, too
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _lines(path: Path, data: bytes) -> tuple[list[Record], int]:
    """The whole lines, and how many bytes they take."""
    whole = data.rfind(b"\n") + 1
    if not whole and data[: len(_START)] != _START[: len(data)]:  # no torn header: somebody's file, not ours to cut
        raise JournalError(f"{path} is no journal: it begins with {data[:30]!r}. Name another file.")
    lines: list[Record] = []
    for number, line in enumerate(data[:whole].split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise JournalError(
                f"{path}, line {number}: expected a JSON object, found {line[:60]!r}. The file is damaged in the "
                "middle, which no interruption does; restore it, or delete it to start again."
            )
        lines.append(record)
    return lines, whole


def _check_header(path: Path, line: Record, expected: Record) -> None:
    found = line.get("format"), line.get("version")
    if found != (FORMAT, VERSION) or not isinstance(line.get("header"), dict):
        raise JournalError(
            f"{path} is no journal that this depthfold reads: its first line has format {found[0]!r}, version "
            f"{found[1]!r}; expected {FORMAT!r}, version {VERSION}. Name another file."
        )
    if line["header"] != expected:
        raise HeaderMismatch(path, line["header"], expected)


def _lock(path: Path, file: int) -> None:
    # A lock of the kernel's: it ends with its process, however that ends, so none is ever left behind.
    try:
        with _clearly(path, "locked", but=BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise JournalError(
            f"The journal {path} is in use by another process. Wait for it, or give this run a folder of its own."
        ) from error


def _write(file: int, record: Record) -> None:
    data = memoryview(_dumps(record).encode() + b"\n")
    while data:  # a write may take less than it is given
        data = data[os.write(file, data) :]
    os.fsync(file)


def _plain(record: Mapping[str, Any]) -> Record:
    """The record as it will be read back: tuples as lists, and so on."""
    return dict(json.loads(_dumps(record)))


def _dumps(record: Mapping[str, Any]) -> str:
    try:
        return json.dumps(record, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise JournalError(f"A journal holds plain JSON; this record has no such form: {error}.") from error


@contextlib.contextmanager
def _clearly(path: Path, what: str, but: type[OSError] | tuple[()] = ()) -> Iterator[None]:
    try:
        yield
    except but:
        raise
    except OSError as error:
        raise JournalError(
            f"The journal {path} cannot be {what}: {error.strerror}. Check the folder and its "
            "free space, or name another."
        ) from error
