"""Progress as lines: when something begins, now and then, and when it is done."""

import depthfold.progress as progress
from depthfold.progress import progress_lines


def test_lines_say_how_far_it_is_and_how_much_time_is_left(monkeypatch):
    clock, lines = [100.0], []
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    tick = progress_lines(lines.append, seconds=10)("blocks", 12, 2)
    for _ in range(10):
        clock[0] += 3
        tick()
    # 3 seconds a turn: lines after the turns that are 10 seconds or more apart, and at the end.
    assert lines == [
        "blocks: 2 of 12",
        "blocks: 6 of 12, about 18 s left",
        "blocks: 10 of 12, about 6 s left",
        "blocks: 12 of 12, done",
    ]


def test_what_is_already_done_needs_no_tick():
    lines = []
    progress_lines(lines.append)("blocks", 3, 3)
    assert lines == ["blocks: 3 of 3"]
