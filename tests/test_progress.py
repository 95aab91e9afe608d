"""Progress as bars in terminals and notebooks, and as lines in a log."""

import io
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import depthfold as df
from depthfold import progress
from depthfold.progress import progress_bars, progress_lines, silent


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


@pytest.mark.parametrize(("total", "known"), [(10, 3), (200, 10)])
def test_first_steps_do_not_tell_the_remaining_time(monkeypatch, total, known):
    """The first one takes 100 seconds, because compiling is part of it."""
    clock, lines = [100.0], []
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    tick = progress_lines(lines.append, seconds=0)("blocks", total + 5, 5)
    for n in range(known):
        clock[0] += 1 if n else 100
        tick()
    assert lines[:-1] == [f"blocks: {n + 5} of {total + 5}" for n in range(known)]
    assert re.fullmatch(rf"blocks: {known + 5} of {total + 5}, about \d+ s left", lines[-1])


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


class Screen(io.StringIO):
    """A terminal that keeps what is written to it."""

    def isatty(self):
        return True


def terminal(monkeypatch):
    """Put a terminal in place of stderr, and no kernel of Jupyter. Not a fixture: pytest replaces stderr after it."""
    found = Screen()
    monkeypatch.setattr(sys, "stderr", found)
    monkeypatch.setattr(progress, "_in_notebook", lambda: False)
    for name, value in (("TERM", "xterm"), ("COLUMNS", "120")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(progress.SWITCH, raising=False)
    return found


def frames(screen):
    """Return the drawn lines without colours."""
    return [
        line.strip()
        for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", screen.getvalue()))
        if line.strip()
    ]


def test_terminal_has_one_bar_with_the_headline_and_the_last_note_and_a_line_at_the_end(monkeypatch):
    screen = terminal(monkeypatch)
    with progress_bars("Fine-tuning") as begin:
        begin("scores", 1, 0)()
        tick = begin("steps", 2, 1)
        tick()
        begin("steps", 7, 0)()  # the first are complete, so these start again
        tick = begin("steps", 5, 2)  # corrects the total
        progress.note(tick, lambda: "loss 0.25, score 91")
        tick()
    *_, last, end = frames(screen)  # the last frame is always drawn, others depend on the time
    assert re.fullmatch(r"Fine-tuning: steps \S+ 3/5 \S+ loss 0.25, score 91", last)
    assert end == "Fine-tuning: done in 0 s; loss 0.25, score 91"


def test_terminal_shows_no_remaining_time_after_the_first_steps(monkeypatch):
    screen = terminal(monkeypatch)
    with progress_bars() as begin:
        tick = begin("steps", 300, 100)
        for _ in range(9):  # of 200
            tick()
    *_, last, _ = frames(screen)
    assert re.fullmatch(r"steps \S+ 109/300 -:--:--", last)
    screen = terminal(monkeypatch)
    with progress_bars() as begin:
        tick = begin("steps", 300, 100)
        for _ in range(10):
            tick()
    *_, last, _ = frames(screen)
    assert re.fullmatch(r"steps \S+ 110/300 \d:\d\d:\d\d", last)


def test_failed_stage_is_not_done(monkeypatch):
    screen = terminal(monkeypatch)
    with pytest.raises(KeyboardInterrupt), progress_bars("Fine-tuning") as begin:
        begin("steps", 2, 0)
        raise KeyboardInterrupt
    assert "Fine-tuning" in screen.getvalue() and "done" not in screen.getvalue()


@pytest.mark.parametrize("reason", ["switch", "no rich", "not a terminal"])
def test_nothing_is_shown(reason, monkeypatch):
    screen = terminal(monkeypatch)
    if reason == "switch":
        monkeypatch.setenv("DEPTHFOLD_PROGRESS", "off")
    elif reason == "no rich":
        monkeypatch.setitem(sys.modules, "rich", None)
    else:
        monkeypatch.setattr(Screen, "isatty", lambda self: False)
    with progress_bars("Fine-tuning") as begin:
        assert begin is silent
    assert screen.getvalue() == ""


def test_notebook_shows_a_bar_and_the_time_at_the_end(monkeypatch):
    clock, cells = [100.0], []

    class Handle:
        def update(self, shown):
            cells.append(shown)

    def display(shown, display_id):
        cells.append(shown)
        return Handle()

    kernel = SimpleNamespace(kernel=object())
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: kernel))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(HTML=str, display=display))
    with progress_bars("T on <a runtime>") as begin:
        tick = begin("blocks", 40, 0)
        for _ in range(40):
            clock[0] += 0.1
            tick()
    assert cells[0] == "T on &lt;a runtime&gt;: blocks"
    assert cells[1] == 'T on &lt;a runtime&gt;: blocks <progress max="40" value="0"></progress> 0/40 '
    assert 8 < len(cells) < 13  # not a message to the browser for each step
    assert 'value="40"' in cells[-2]
    assert cells[-1] == "T on &lt;a runtime&gt;: done in 4 s"
    cells.clear()
    with progress_bars() as begin:
        assert not cells  # nothing is shown before there is a step
        begin("images", 1, 0)()
    assert cells[-1] == "images: done in 0 s"


def test_every_verb_shows_its_stage_by_default(monkeypatch):
    """On a terminal and without `progress`: the headline of each stage, and the loss and the score of fine-tuning."""
    screen = terminal(monkeypatch)
    torch.manual_seed(0)
    layers = [part for _ in range(3) for part in (nn.Conv2d(3, 3, 3, padding=1), nn.ReLU())]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    data = torch.rand(48, 3, 6, 6), torch.arange(48) % 3
    task = df.ClassificationTask.tensors(train=data, test=data, holdout=0.25)
    traced, recipe = df.trace(model, task.example()), df.Recipe(steps=3, batch=8, lr=0.01)
    latency = df.measure_latency(traced, "cost_model")
    importance = df.measure_importance(traced, task, recipe, method="recalibrated")
    plan = df.choose(traced, df.solve(latency, importance, network=traced.network), "99%", "cost_model")
    df.finetune(df.rewrite(traced, plan), task, recipe)
    ends = [line for line in frames(screen) if ": done in " in line]
    stages = ["Latency table on cost_model", "Importance table", "Choosing a plan", "Fine-tuning"]
    assert [line.partition(": done in ")[0] for line in ends] == stages
    assert "; last score " in ends[1]
    assert re.search(r"; loss \d\.\d+, score \d+", ends[3])
