"""Progress of measurements and training: a bar per stage in terminals and notebooks, lines in a log.

DEPTHFOLD_PROGRESS=off in the environment switches the bars off, `progress=silent` those of one call.
"""

from __future__ import annotations

import contextlib
import html
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

# progress(what, total, done) returns a function to call after each further step. A second call with the same `what`,
# before the first is complete, corrects the total. The function may have a method note(text): see note().
Tick = Callable[[], None]
Progress = Callable[[str, int, int], Tick]

SWITCH = "DEPTHFOLD_PROGRESS"
REDRAW = 0.5  # seconds between two drawings in a notebook, each of which is a message to the browser
# The remaining time is not shown before this many steps and this share of them are done: the first ones take longer,
# because they include what comes before them, such as compiling.
FIRST_STEPS, FIRST_SHARE = 3, 0.05


def silent(what: str, total: int, done: int) -> Tick:
    """Show nothing."""
    return lambda: None


def note(tick: Tick, text: Callable[[], str]) -> None:
    """Show a text beside the steps, for example the present loss, if this progress can."""
    if (show := getattr(tick, "note", None)) is not None:
        show(text())


@contextlib.contextmanager
def progress_bars(headline: str = "") -> Iterator[Progress]:
    """Show one bar for a stage in a terminal or a notebook, and a line with its time at the end; elsewhere nothing.

    The bar has the headline, the steps, the remaining time and the last note. It needs rich in a terminal.
    """
    drawing = _drawing()
    if drawing is None:
        yield silent
        return
    with drawing(headline) as draw:
        yield _Stage(draw)


def _predicts(done: float, total: float) -> bool:
    """Return True if the steps since the start, of this total, tell how long the others will take."""
    return done >= max(FIRST_STEPS, FIRST_SHARE * total)


class _Stage:
    """The steps of a stage, by what they are. `draw` is called with what changed last, its total, done and note."""

    def __init__(self, draw: Callable[[str, int, int, str], None]) -> None:
        self._draw, self._counts, self._note = draw, dict[str, list[int]](), ""

    def __call__(self, what: str, total: int, done: int) -> Tick:
        count = self._counts.get(what)
        if count is None or count[1] >= count[0]:
            count = self._counts[what] = [total, done]
        else:
            count[:] = total, done
        self._draw(what, total, done, self._note)
        return _Step(self, what, count)

    def step(self, what: str, count: list[int]) -> None:
        count[1] += 1
        self._draw(what, count[0], count[1], self._note)

    def note(self, what: str, count: list[int], text: str) -> None:
        self._note = text
        self._draw(what, count[0], count[1], text)


class _Step:
    """The function that counts a step of a stage."""

    def __init__(self, stage: _Stage, what: str, count: list[int]) -> None:
        self._stage, self._what, self._count = stage, what, count

    def __call__(self) -> None:
        self._stage.step(self._what, self._count)

    def note(self, text: str) -> None:
        self._stage.note(self._what, self._count, text)


def _drawing() -> Callable[[str], Any] | None:
    """Return how to draw a stage here; None if there is nobody to see it, no rich, or if it is switched off."""
    if os.environ.get(SWITCH, "").lower() in ("off", "0", "no", "false"):
        return None
    if _in_notebook():
        return _in_cell
    if not sys.stderr.isatty():
        return None
    try:
        import rich  # noqa: F401
    except ImportError:
        return None
    return _on_terminal


def _in_notebook() -> bool:
    """Return True in a kernel of Jupyter, which displays HTML; IPython in a terminal has none."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


@contextlib.contextmanager
def _on_terminal(headline: str) -> Iterator[Callable[[str, int, int, str], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Task, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars
    from rich.text import Text

    class TimeLeft(TimeRemainingColumn):
        def render(self, task: Task) -> Text:
            begun, total = task.fields["begun"], task.total or 0.0
            return super().render(task) if _predicts(task.completed - begun, total - begun) else Text("-:--:--")

    note_column = TextColumn("{task.fields[note]}", markup=False)
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeLeft(), note_column,
    )  # fmt: skip
    started, shown, last = time.monotonic(), "", ""
    # By default Rich estimates from the last 30 seconds; one step can take longer than that.
    with Bars(*columns, console=Console(stderr=True), speed_estimate_period=1e9, transient=True) as bars:
        bar = bars.add_task(headline, total=None, note="", begun=0)

        def draw(what: str, total: int, done: int, text: str) -> None:
            nonlocal shown, last
            if what != shown:  # another kind of steps, with another speed
                bars.reset(bar, description=_title(headline, what), total=total, completed=done, note=text, begun=done)
            else:
                bars.update(bar, total=total, completed=done, note=text)
            shown, last = what, text

        yield draw
    if shown:
        Console(stderr=True).print(Text(_summary(headline or shown, started, last)), soft_wrap=True)


@contextlib.contextmanager
def _in_cell(headline: str) -> Iterator[Callable[[str, int, int, str], None]]:
    ipython = importlib.import_module("IPython.display")  # not a dependency, and without types
    started, drawn, last, shown, handle = time.monotonic(), 0.0, "", "", None

    def draw(what: str, total: int, done: int, text: str) -> None:
        nonlocal drawn, last, shown, handle
        last, shown = text, what
        if handle is None:  # not earlier: a stage without steps shows nothing
            handle = ipython.display(ipython.HTML(html.escape(_title(headline, what))), display_id=True)
        if done < total and time.monotonic() - drawn < REDRAW:
            return
        drawn = time.monotonic()
        title, after = html.escape(_title(headline, what)), html.escape(text)
        handle.update(
            ipython.HTML(f'{title} <progress max="{total}" value="{done}"></progress> {done}/{total} {after}')
        )

    yield draw
    if handle is not None:
        handle.update(ipython.HTML(html.escape(_summary(headline or shown, started, last))))


def _title(headline: str, what: str) -> str:
    return f"{headline}: {what}" if headline else what


def _summary(headline: str, started: float, text: str) -> str:
    return f"{headline}: done in {time.monotonic() - started:.0f} s" + (f"; {text}" if text else "")


def progress_lines(write: Callable[[str], None], seconds: float = 10.0) -> Progress:
    """Write a line at the start, at the end, and at most every `seconds` seconds in between."""
    running: dict[str, _Lines] = {}

    def progress(what: str, total: int, done: int) -> Tick:
        lines = running.get(what)
        if lines is None or lines.done >= lines.total:
            lines = running[what] = _Lines(what, total, done, write, seconds)
        else:
            lines.total, lines.done = total, done
        return lines

    return progress


class _Lines:
    """The lines of one task. The remaining time is estimated from the steps since the start."""

    def __init__(self, what: str, total: int, done: int, write: Callable[[str], None], seconds: float) -> None:
        self.what, self.total, self.done, self.write, self.seconds = what, total, done, write, seconds
        self.started, self.done_at_start, self.text = time.monotonic(), done, ""
        self.last_line = self.started
        write(f"{what}: {done} of {total}")

    def __call__(self) -> None:
        self.done, now = self.done + 1, time.monotonic()
        if self.done < self.total and now - self.last_line < self.seconds:
            return
        self.last_line = now
        steps, end = self.done - self.done_at_start, ""
        if self.done >= self.total:
            end = ", done"
        elif _predicts(steps, self.total - self.done_at_start):
            end = f", about {(self.total - self.done) * (now - self.started) / steps:.0f} s left"
        self.write(f"{self.what}: {self.done} of {self.total}{end}{f'; {self.text}' if self.text else ''}")

    def note(self, text: str) -> None:
        self.text = text
