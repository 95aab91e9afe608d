"""The journal survives a kill at any byte, and reports damage and wrong files."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from depthfold.errors import JournalError
from depthfold.store import HeaderMismatch, Journal

HEADER = {"environment": {"machine": "lab", "threads": 2}, "fingerprint": "12ab"}
RECORDS = [{"span": [0, 1], "samples": [1.25, 1.5]}, {"span": [0, 2], "reason": "too wide: Ω"}, {"span": [1, 2]}]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "latency.jsonl"


def write(path, records=RECORDS):
    with Journal(path, HEADER) as journal:
        for record in records:
            journal.append(record)


def read(path):
    with Journal(path, HEADER) as journal:
        return list(journal)


def test_records_are_read_in_order(path):
    write(path)
    assert read(path) == RECORDS
    write(path, [{"more": 1}])
    assert read(path) == [*RECORDS, {"more": 1}]


def test_appended_records_are_visible_at_once(path):
    with Journal(path, HEADER) as journal:
        journal.append({"span": (0, 1)})
        assert list(journal) == [{"span": [0, 1]}]
        assert len(journal) == 1
        assert json.loads(path.read_bytes().splitlines()[-1]) == {"span": [0, 1]}  # already in the file


def test_journal_cut_at_any_byte_continues(path):
    write(path)
    whole = path.read_bytes()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        kept = max(0, whole[:length].count(b"\n") - 1)
        with Journal(path, HEADER) as journal:
            assert list(journal) == RECORDS[:kept]
            journal.append({"after": length})
        assert read(path) == [*RECORDS[:kept], {"after": length}]


def test_garbage_after_the_last_line_break_is_dropped(path):
    write(path)
    path.write_bytes(path.read_bytes() + b"\x00\x00\xff")
    assert read(path) == RECORDS


@pytest.mark.parametrize("damage", [b"{not json}", b"", b"[1, 2]", b"\x00\x00"])
def test_damaged_line_in_the_middle_is_an_error(path, damage):
    write(path)
    lines = path.read_bytes().split(b"\n")
    lines[2] = damage
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(JournalError, match=r"latency.jsonl, line 3: expected a JSON object, found"):
        Journal(path, HEADER)
    assert path.read_bytes() == b"\n".join(lines)  # what cannot be read is left as it is


def test_another_header_is_refused_with_the_differences(path):
    write(path)
    other = {"environment": {"machine": "desk", "threads": 2}, "fingerprint": "12ab"}
    with pytest.raises(HeaderMismatch, match="was made from other inputs") as caught:
        Journal(path, other)
    assert (caught.value.found, caught.value.expected) == (HEADER, other)
    assert "(environment.machine: lab there, desk here)" in str(caught.value)
    assert read(path) == RECORDS


def test_file_that_is_not_a_journal_is_refused_and_kept(path):
    path.parent.mkdir()
    path.write_text('{"format": "depthfold.plan", "version": 1}\n')
    with pytest.raises(JournalError, match=r"not a journal that this depthfold reads: .* format 'depthfold.plan'"):
        Journal(path, HEADER)
    assert "depthfold.plan" in path.read_text()


def test_file_without_a_line_break_is_not_taken_for_an_incomplete_header(path):
    path.parent.mkdir()
    path.write_text("my notes")
    with pytest.raises(JournalError, match=r"is not a journal: it begins with b'my notes'"):
        Journal(path, HEADER)
    assert path.read_text() == "my notes"


def test_record_that_is_not_json_is_refused_and_not_written(path):
    with Journal(path, HEADER) as journal:
        before = path.read_bytes()
        for record in ({"x": float("nan")}, {"x": object()}):
            with pytest.raises(JournalError, match="A record of a journal must be plain JSON"):
                journal.append(record)
        assert path.read_bytes() == before


def test_second_writer_is_refused(path):
    with Journal(path, HEADER), pytest.raises(JournalError, match="in use by another process"):
        Journal(path, HEADER)
    assert read(path) == []


def test_disk_without_locks(path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(JournalError, match="cannot be locked: No locks available"):
        Journal(path, HEADER)


def test_closed_journal_refuses_records(path):
    journal = Journal(path, HEADER)
    journal.close()
    journal.close()
    with pytest.raises(JournalError, match="is closed"):
        journal.append({})


def test_folder_that_cannot_be_written_is_reported(path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)  # the tests may run as root, whom no folder refuses
    with pytest.raises(JournalError, match=r"cannot be opened: Permission denied\. Check the folder"):
        Journal(path, HEADER)


def test_path_through_a_file_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match="cannot be opened"):
        Journal(tmp_path / "file" / "latency.jsonl", HEADER)


def test_full_disk_leaves_the_journal_unchanged(path, monkeypatch):
    write(path)
    real = os.write

    def half(file, data):
        if len(data) <= 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data[: len(data) - 5])

    with Journal(path, HEADER) as journal:
        before = path.read_bytes()
        monkeypatch.setattr(os, "write", half)
        with pytest.raises(JournalError, match="cannot be written: No space left on device"):
            journal.append({"a": "long enough"})
        assert path.read_bytes() == before
        assert list(journal) == RECORDS
        monkeypatch.undo()
        journal.append({"a": 1})
    assert read(path) == [*RECORDS, {"a": 1}]


def test_every_append_is_synced(path, monkeypatch):
    synced = []
    real = os.fsync
    with Journal(path, HEADER) as journal:
        monkeypatch.setattr(os, "fsync", lambda file: (synced.append(path.read_bytes()), real(file)))
        journal.append({"a": 1})
        assert synced == [path.read_bytes()]


WRITER = textwrap.dedent(
    """
    import sys
    from depthfold.store import Journal
    with Journal(sys.argv[1], {"who": "writer"}) as journal:
        start = len(journal)
        for n in range(start, 10**9):
            journal.append({"n": n, "filler": "x" * 1000})
            sys.stdout.write(f"{n}\\n")
            sys.stdout.flush()
    """
)


def test_killed_writer_loses_at_most_the_current_record(path):
    after = 0
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
        said = [int(writer.stdout.readline()) for _ in range(20)]
        writer.send_signal(signal.SIGKILL)
        said += [int(line) for line in writer.stdout.read().splitlines() if line]
        writer.wait()
        writer.stdout.close()
        with Journal(path, {"who": "writer"}) as journal:
            kept = [record["n"] for record in journal]
        assert said[0] == after  # it went on where the last one was
        assert kept == list(range(len(kept)))
        assert said[-1] <= kept[-1] <= said[-1] + 1
        after = len(kept)


def test_journal_can_be_locked_where_a_lock_needs_an_open_file_that_can_be_written(path, monkeypatch):
    """Like NFS."""
    flock = fcntl.flock

    def of_nfs(handle, operation):
        if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(handle, operation)

    monkeypatch.setattr("fcntl.flock", of_nfs)
    write(path)
    assert read(path) == RECORDS
