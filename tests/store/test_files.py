"""Atomic writes and locks."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from depthfold.errors import RunError
from depthfold.store import Journal
from depthfold.store.files import lock, put_all_in_place, put_in_place


def names(folder):
    return sorted(path.name for path in folder.rglob("*"))


def test_put_all_in_place_moves_all_files(tmp_path):
    with put_all_in_place(tmp_path / "new" / "main.txt") as main:
        assert main.name == "main.txt"
        main.write_text("main")
        main.with_name("other.bin").write_text("other")
        assert not (tmp_path / "new" / "main.txt").exists()
    assert names(tmp_path / "new") == ["main.txt", "other.bin"]
    assert (tmp_path / "new" / "other.bin").read_text() == "other"


def test_error_leaves_the_old_file(tmp_path):
    (tmp_path / "main.txt").write_text("before")
    with pytest.raises(ZeroDivisionError), put_all_in_place(tmp_path / "main.txt") as main:
        main.write_text("half of")
        raise ZeroDivisionError
    assert names(tmp_path) == ["main.txt"]
    assert (tmp_path / "main.txt").read_text() == "before"


def test_leftover_folder_of_a_killed_writer_is_removed(tmp_path):
    (tmp_path / ".main.txt.partial").mkdir()
    (tmp_path / ".main.txt.partial" / "old").write_text("")
    with put_all_in_place(tmp_path / "main.txt") as main:
        main.write_text("new")
    assert names(tmp_path) == ["main.txt"]


def test_main_file_is_moved_last(tmp_path, monkeypatch):
    """If it exists, so do the others."""
    placed, replace = [], Path.replace

    def spy(path, target):
        placed.append(Path(target).name)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", spy)
    with put_all_in_place(tmp_path / "m.txt") as main:
        for name in ("m.txt", "a.bin", "z.bin"):
            main.with_name(name).write_text(name)
    assert sorted(placed[:2]) == ["a.bin", "z.bin"]
    assert placed[2] == "m.txt"


def test_full_disk_leaves_the_old_file_and_no_partial_file(tmp_path, monkeypatch):
    path = tmp_path / "document.json"
    path.write_text("before")

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"), put_in_place(path) as partial:
        partial.write_text("after")
    assert names(tmp_path) == ["document.json"]
    assert path.read_text() == "before"


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_failed_writer_leaves_no_partial_file(error, tmp_path):
    with pytest.raises(error), put_in_place(tmp_path / "document.json") as partial:
        partial.write_text("half of")
        raise error
    assert names(tmp_path) == []


def test_writer_that_wrote_nothing_raises_its_own_error(tmp_path):
    with pytest.raises(ZeroDivisionError), put_in_place(tmp_path / "document.json"):
        raise ZeroDivisionError


def test_partial_file_of_a_killed_writer_is_overwritten(tmp_path):
    (tmp_path / "document.json.partial").write_text("of a killed writer, and longer than what comes")
    with put_in_place(tmp_path / "document.json") as partial:
        partial.write_text("new")
    assert names(tmp_path) == ["document.json"]
    assert (tmp_path / "document.json").read_text() == "new"


def test_lock_is_exclusive_and_ends_with_its_block(tmp_path):
    (tmp_path / "file").write_text("kept")
    for path in (tmp_path, tmp_path / "file"):
        busy = pytest.raises(RunError, match=r" is in use by another process\. Wait for it")
        with lock(path, RunError), busy, lock(path, RunError):
            raise AssertionError("locked twice")
        with lock(path, RunError):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_lock_ends_with_a_killed_process(tmp_path):
    script = (
        "import sys, time; from pathlib import Path\n"
        "from depthfold.store import lock; from depthfold.errors import RunError\n"
        "with lock(Path(sys.argv[1]), RunError): print('locked', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(RunError, match="in use by another process"), lock(tmp_path, RunError):
            pass
        holder.kill()
    with lock(tmp_path, RunError):
        pass


@contextlib.contextmanager
def forked_process():
    """A process that inherits all open files and does nothing, as an idle worker of a DataLoader."""
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(1)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_lock_ends_with_its_block_although_a_forked_process_lives_on(tmp_path):
    with contextlib.ExitStack() as processes:
        with lock(tmp_path, RunError):
            processes.enter_context(forked_process())
        with lock(tmp_path, RunError):
            pass


def test_lock_of_a_journal_ends_with_it_although_a_forked_process_lives_on(tmp_path):
    with contextlib.ExitStack() as processes:
        with Journal(tmp_path / "journal.jsonl", {"a": 1}):
            processes.enter_context(forked_process())
        with Journal(tmp_path / "journal.jsonl", {"a": 1}):
            pass


def test_missing_file_cannot_be_locked(tmp_path):
    missing = pytest.raises(RunError, match="gone cannot be locked: No such file or directory")
    with missing, lock(tmp_path / "gone", RunError):
        pass


def test_forked_process_that_leaves_the_block_does_not_release_the_lock(tmp_path):
    parent = os.getpid()
    with lock(tmp_path, RunError):
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            with pytest.raises(RunError, match="in use"), lock(tmp_path, RunError):
                pass
    if os.getpid() != parent:
        os._exit(0)
