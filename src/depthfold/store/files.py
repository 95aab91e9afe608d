"""Files that are complete or not there at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def put_in_place(path: Path) -> Iterator[Path]:
    """A path to write to, beside `path`; what was written there takes its place when the block ends without an error.

    When it ends with one, nothing is left of it. Killed at any byte, `path` is what it was. The file of a killed writer
    stays beside it and is written over by the next, so there may be only one writer at a time.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        sync(partial)
        partial.replace(path)
        sync(path.parent)  # a file is on disk under its name only when its folder is
    except BaseException:
        with contextlib.suppress(OSError):  # it may not be there, and the first error is the one to tell
            partial.unlink()
        raise


@contextlib.contextmanager
def put_all_in_place(path: Path) -> Iterator[Path]:
    """The same for a file that has others beside it: a path of the same name, in an empty folder beside `path`.

    When the block ends without an error, every file in that folder takes its place beside `path`, and `path` itself
    comes last: where it is, the others are. When it ends with one, nothing is left of it. Parent folders are made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = path.with_name(f".{path.name}.partial")
    if folder.exists():
        shutil.rmtree(folder)  # of a killed writer
    folder.mkdir()
    try:
        yield folder / path.name
        for file in sorted(folder.iterdir(), key=lambda each: each.name == path.name):
            sync(file)
            file.replace(path.with_name(file.name))
        sync(path.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file, or the list of files of a folder, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
