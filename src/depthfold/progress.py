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
    """A line when something begins, one every so many seconds, and one at its end: for logs, where bars would not do.

    The time that is left is by the turns since it began, as the bars say it.
    """

    def progress(what: str, total: int, done: int) -> Tick:
        started = told = time.monotonic()
        taken = done
        say(f"{what}: {done} of {total}")

        def tick() -> None:
            nonlocal taken, told
            taken, now = taken + 1, time.monotonic()
            if taken < total and now - told < seconds:
                return
            told = now
            left = (total - taken) * (now - started) / (taken - done)
            say(f"{what}: {taken} of {total}, " + (f"about {left:.0f} s left" if taken < total else "done"))

        return tick

    return progress
