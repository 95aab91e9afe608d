"""Progress as lines in a log."""

import depthfold.progress as progress
from depthfold.progress import progress_lines


def test_lines_have_the_progress_and_the_remaining_time(monkeypatch):
    clock, lines = [100.0], []
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    tick = progress_lines(lines.append, seconds=10)("blocks", 12, 2)
    for _ in range(10):
        clock[0] += 3
        tick()
    # 3 seconds per step: a line after at least 10 seconds, and one at the end.
    assert lines == [
        "blocks: 2 of 12",
        "blocks: 6 of 12, about 18 s left",
        "blocks: 10 of 12, about 6 s left",
        "blocks: 12 of 12, done",
    ]


def test_second_call_corrects_the_total(monkeypatch):
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
    begin("blocks", 5, 0)  # the first one is complete, so this starts another
    assert lines == ["blocks: 0 of 2", "blocks: 3 of 4, about 4 s left", "blocks: 4 of 4, done", "blocks: 0 of 5"]


def test_complete_task_has_one_line():
    lines = []
    progress_lines(lines.append)("blocks", 3, 3)
    assert lines == ["blocks: 3 of 3"]
