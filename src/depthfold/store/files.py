"""Files that are complete or not there at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def put_in_place(path: Path) -> Iterator[Path]:
    """A path to write to, beside `path`; what was written there takes its place when the block ends without an error.

    Killed at any byte, `path` is what it was. The file of a killed writer stays beside it and is written over by the
    next, so there may be only one writer at a time.
    """
    partial = path.with_name(path.name + ".partial")
    yield partial
    sync(partial)
    partial.replace(path)
    sync(path.parent)  # a file is on disk under its name only when its folder is


def sync(path: Path) -> None:
    """Wait until a file, or the list of files of a folder, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
