"""Progress of measurements and training: bars on a terminal, lines in a log."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

# progress(what, total, done) returns a function to call after each further step. A second call with the same `what`,
# before the first is complete, corrects the total.
Tick = Callable[[], None]
Progress = Callable[[str, int, int], Tick]


def silent(what: str, total: int, done: int) -> Tick:
    """Show nothing."""
    return lambda: None


@contextlib.contextmanager
def progress_bars() -> Iterator[Progress]:
    """Show progress bars with the remaining time on a terminal, and nothing elsewhere."""
    if not sys.stderr.isatty():
        yield silent
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # By default Rich estimates from the last 30 seconds; one step can take longer than that.
    with Bars(*columns, console=Console(stderr=True), speed_estimate_period=1e9) as bars:
        running: dict[str, TaskID] = {}

        def progress(what: str, total: int, done: int) -> Tick:
            task = running.get(what)
            if task is None or bars.tasks[task].completed >= (bars.tasks[task].total or 0):
                task = running[what] = bars.add_task(what, total=total, completed=done)
            else:
                bars.update(task, total=total, completed=done)
            return lambda: bars.advance(task)

        yield progress


def progress_lines(write: Callable[[str], None], seconds: float = 10.0) -> Progress:
    """Write a line at the start, at the end, and at most every `seconds` seconds in between."""
    running: dict[str, _Lines] = {}

    def progress(what: str, total: int, done: int) -> Tick:
        lines = running.get(what)
        if lines is None or lines.done >= lines.total:
            lines = running[what] = _Lines(what, total, done, write, seconds)
        else:
            lines.total, lines.done = total, done
        return lines.tick

    return progress


class _Lines:
    """The lines of one task. The remaining time is estimated from the steps since the start."""

    def __init__(self, what: str, total: int, done: int, write: Callable[[str], None], seconds: float) -> None:
        self.what, self.total, self.done, self.write, self.seconds = what, total, done, write, seconds
        self.started, self.done_at_start = time.monotonic(), done
        self.last_line = self.started
        write(f"{what}: {done} of {total}")

    def tick(self) -> None:
        self.done, now = self.done + 1, time.monotonic()
        if self.done < self.total and now - self.last_line < self.seconds:
            return
        self.last_line = now
        left = (self.total - self.done) * (now - self.started) / max(self.done - self.done_at_start, 1)
        end = f"about {left:.0f} s left" if self.done < self.total else "done"
        self.write(f"{self.what}: {self.done} of {self.total}, {end}")
