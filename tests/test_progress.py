"""Progress as lines of text: at the start, at intervals, and at the end."""

import depthfold.progress as progress
from depthfold.progress import progress_lines


def test_lines_show_progress_and_remaining_time(monkeypatch):
    clock, lines = [100.0], []
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    tick = progress_lines(lines.append, seconds=10)("blocks", 12, 2)
    for _ in range(10):
        clock[0] += 3
        tick()
    # Each turn takes 3 s: a line after at least 10 s, and at the end.
    assert lines == [
        "blocks: 2 of 12",
        "blocks: 6 of 12, about 18 s left",
        "blocks: 10 of 12, about 6 s left",
        "blocks: 12 of 12, done",
    ]


def test_larger_total_continues_the_same_progress(monkeypatch):
    clock, lines = [0.0], []
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    begin = progress_lines(lines.append, seconds=10)
    tick = begin("blocks", 2, 0)
    clock[0] = 4
    tick()
    tick = begin("blocks", 4, 1)
    for _ in range(3):
        clock[0] += 4
        tick()
    begin("blocks", 5, 0)  # the next table
    assert lines == ["blocks: 0 of 2", "blocks: 3 of 4, about 4 s left", "blocks: 4 of 4, done", "blocks: 0 of 5"]


def test_completed_progress_needs_no_tick():
    lines = []
    progress_lines(lines.append)("blocks", 3, 3)
    assert lines == ["blocks: 3 of 3"]
