"""What the commands print: calm, and plain text where nobody watches."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from depthfold.progress import Progress, progress_lines

if TYPE_CHECKING:
    from depthfold.pipeline import Compressed
    from depthfold.reporting import Evaluation


def say(text: object) -> None:
    """A text on stdout as it is: no line of it is broken, nothing in it is markup."""
    Console(highlight=False).print(Text(str(text)), soft_wrap=True)


def watched() -> Progress | None:
    """How far a stage is: nobody's business here where a terminal shows bars, lines on stderr where none does."""
    console = Console(stderr=True, highlight=False)
    return None if console.is_terminal else progress_lines(lambda line: console.print(Text(line), soft_wrap=True))


def complain(kind: str, text: str, style: str) -> None:
    """A paragraph on stderr."""
    Console(stderr=True, highlight=False).print(Text.assemble((f"{kind}: ", style), text), soft_wrap=True)


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Takes the place of warnings.showwarning: what depthfold says of a run, without the line of code."""
    complain("Warning", str(message), "bold yellow")


def hush_libraries() -> None:
    """Only depthfold's own warnings: those of the libraries are for whoever writes code with them."""
    warnings.simplefilter("ignore")
    for category in (UserWarning, RuntimeWarning):
        warnings.filterwarnings("default", category=category, module=r"depthfold(\..*)?")
    warnings.showwarning = show_warning


def summary(done: Compressed, files: Iterable[str]) -> None:
    """Before and after, and where everything is."""
    findings = done.findings
    before, after = findings.before, findings.after
    table = Table("", "before", "after", "", box=box.SIMPLE_HEAD, title=findings.title, title_justify="left")
    if before is not None and after is not None:
        table.add_row(
            "latency", f"{before.latency:.4g} ms", f"{after.latency:.4g} ms",
            f"{before.latency / after.latency:.2f}x as fast",
        )  # fmt: skip
        halves = (f"{profile.spread[0]:.4g} to {profile.spread[1]:.4g}" for profile in (before, after))
        table.add_row("middle half, ms", *halves, "")
    one, two = findings.score_before, findings.score_after
    if one is not None and two is not None:
        table.add_row(f"{one.metric}, {one.split}", _score(one), _score(two), _change(one, two))
    table.add_row("traced convolutions", str(findings.network.depth), str(len(done.plan.segments)), "")
    Console(highlight=False).print(table)
    for name in files:
        say(f"  {name}")


def _score(evaluation: Evaluation) -> str:
    if not evaluation.share:
        return f"{evaluation.score:.4g}"
    error = evaluation.standard_error
    return f"{evaluation.score:.2%}" + (f" ± {100 * error:.2f}" if error is not None else "")


def _change(one: Evaluation, two: Evaluation) -> str:
    change = two.score - one.score
    return f"{100 * change:+.2f} points" if one.share else f"{change:+.4g}"
