"""How far a measurement or a training is, for whoever watches."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

# progress(what, of so many turns, so many taken already) -> a function to call after each further turn. Called again
# for the same thing while it is under way, it says that there are more turns, or fewer, than it seemed.
Tick = Callable[[], None]
Progress = Callable[[str, int, int], Tick]


def silent(what: str, total: int, done: int) -> Tick:
    """Nothing is shown."""
    return lambda: None


@contextlib.contextmanager
def progress_bars() -> Iterator[Progress]:
    """Bars with the time that is left, on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield silent
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Rich looks back 30 seconds; a training may take longer, and then it would never say how much time is left.
    with Bars(*columns, console=Console(stderr=True), speed_estimate_period=1e9) as bars:
        under_way: dict[str, TaskID] = {}

        def progress(what: str, total: int, done: int) -> Tick:
            task = under_way.get(what)
            if task is None or bars.tasks[task].completed >= (bars.tasks[task].total or 0):
                task = under_way[what] = bars.add_task(what, total=total, completed=done)
            else:
                bars.update(task, total=total, completed=done)
            return lambda: bars.advance(task)

        yield progress


def progress_lines(say: Callable[[str], None], seconds: float = 10.0) -> Progress:
    """A line when something begins, one every so many seconds, and one at its end: for logs, where no bar can move."""
    under_way: dict[str, _Lines] = {}

    def progress(what: str, total: int, done: int) -> Tick:
        lines = under_way.get(what)
        if lines is None or lines.taken >= lines.total:
            lines = under_way[what] = _Lines(what, total, done, say, seconds)
        else:
            lines.total, lines.taken = total, done
        return lines.tick

    return progress


class _Lines:
    """One thing that is under way. The time that is left is by the turns since it began, as the bars say it."""

    def __init__(self, what: str, total: int, done: int, say: Callable[[str], None], seconds: float) -> None:
        self.what, self.total, self.taken, self.say, self.seconds = what, total, done, say, seconds
        self.began, self.first = time.monotonic(), done
        self.told = self.began
        say(f"{what}: {done} of {total}")

    def tick(self) -> None:
        self.taken, now = self.taken + 1, time.monotonic()
        if self.taken < self.total and now - self.told < self.seconds:
            return
        self.told = now
        left = (self.total - self.taken) * (now - self.began) / max(self.taken - self.first, 1)
        end = f"about {left:.0f} s left" if self.taken < self.total else "done"
        self.say(f"{self.what}: {self.taken} of {self.total}, {end}")
