"""Atomic writes and locks: a file is complete or absent, and one process at a time uses it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from depthfold.errors import DepthfoldError


@contextlib.contextmanager
def put_in_place(path: Path) -> Iterator[Path]:
    """Yield a path beside `path` to write to. It replaces `path` when the block ends without an error.

    After an error nothing is left of it. After a kill at any byte `path` is unchanged. The partial file of a killed
    writer stays and the next writer overwrites it, so there may be only one writer at a time.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        sync(partial)
        partial.replace(path)
        sync(path.parent)  # a file is on disk under its name only when its folder is
    except BaseException:
        with contextlib.suppress(OSError):  # it may not exist, and the first error is the one to report
            partial.unlink()
        raise


@contextlib.contextmanager
def put_all_in_place(path: Path) -> Iterator[Path]:
    """Do the same for a file that has others beside it: yield a path of the same name in an empty folder beside `path`.

    When the block ends without an error, every file in that folder is moved to the folder of `path`, and `path` itself
    last: if it exists, so do the others. After an error nothing is left. Parent folders are created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = path.with_name(f".{path.name}.partial")
    if folder.exists():
        shutil.rmtree(folder)  # left by a killed writer
    folder.mkdir()
    try:
        yield folder / path.name
        for file in sorted(folder.iterdir(), key=lambda each: each.name == path.name):
            sync(file)
            file.replace(path.with_name(file.name))
        sync(path.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def lock(path: Path, error: type[DepthfoldError]) -> Iterator[None]:
    """Hold an existing file or folder for this process. Raise `error` if another process holds it.

    The lock is the kernel's: it ends with its process, however that ends, and leaves no file behind.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as failure:
        raise error(f"{path} cannot be locked: {failure.strerror}. Use another run folder.") from failure
    owner = os.getpid()
    try:
        lock_open(handle, path, error)
        yield
    finally:
        close_locked(handle, owner)


def lock_open(handle: int, path: Path, error: type[DepthfoldError]) -> None:
    """Hold an open file or folder until it is closed. On NFS, a file has to be open for writing."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as busy:
        raise error(f"{path} is in use by another process. Wait for it, or use another run folder.") from busy
    except OSError as failure:
        raise error(
            f"{path} cannot be locked: {failure.strerror}. Use a run folder on a file system that has locks."
        ) from failure


def close_locked(handle: int, owner: int) -> None:
    """Close, and release in the process that holds the lock: those that it has forked meanwhile would keep it."""
    if os.getpid() == owner:
        with contextlib.suppress(OSError):  # a lock that was never taken
            fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


def sync(path: Path) -> None:
    """Wait until a file, or the list of files of a folder, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
