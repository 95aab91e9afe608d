"""Output of the commands: plain text where it is not a terminal."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from depthfold.progress import Progress, progress_lines
from depthfold.store.run_folder import REPORT, RESULT

if TYPE_CHECKING:
    from depthfold.pipeline import Compressed


def print_text(text: object) -> None:
    """Print a text to stdout without markup and without breaking its lines."""
    Console(highlight=False).print(Text(str(text)), soft_wrap=True)


def print_error(kind: str, text: str, style: str) -> None:
    """Print a paragraph to stderr."""
    Console(stderr=True, highlight=False).print(Text.assemble((f"{kind}: ", style), text), soft_wrap=True)


def progress() -> Progress | None:
    """Return a progress that prints lines to stderr; None on a terminal, where the stages show bars."""
    console = Console(stderr=True, highlight=False)
    return None if console.is_terminal else progress_lines(lambda line: console.print(Text(line), soft_wrap=True))


def show_own_warnings_only() -> None:
    """Print depthfold's warnings as paragraphs, each text once: two stages of a command may give the same warning.

    Those of libraries are meant for programmers.
    """
    warnings.simplefilter("ignore")
    for category in (UserWarning, RuntimeWarning):
        warnings.filterwarnings("default", category=category, module=r"depthfold(\..*)?")
    printed: set[str] = set()

    def show(message: Warning | str, *_: object, **__: object) -> None:
        if (text := str(message)) not in printed:
            printed.add(text)
            print_error("Warning", text, "bold yellow")

    warnings.showwarning = show


def print_summary(done: Compressed, exports: Iterable[str]) -> None:
    """Print both networks side by side, and the paths of the results."""
    compared = done.findings.comparison()
    table = Table(*compared.header, box=box.SIMPLE_HEAD, title=done.findings.title, title_justify="left")
    for row in compared.rows:
        table.add_row(*row)
    Console(highlight=False).print(table)
    if (speedup := done.findings.speedup) and speedup.unreliable:
        again = f"depthfold profile --run {shlex.quote(str(done.folder))}"
        print_text(f"  Unreliable: {speedup.unreliable}. When the machine is quiet, run: {again}\n")
    for each in done.exported:
        if each.int8 is not None:
            print_text(f"  {each.path.name}: {each.int8}\n")
    for name in (REPORT, RESULT, *exports):
        print_text(f"  {done.folder / name}")
