"""Errors and exit codes, in one place for all commands.

0: done. 1: an error that nobody expected. 2: bad input, or a failure that is known. 130: interrupted.
"""

from __future__ import annotations

import traceback
import warnings
from typing import Any

import typer
from typer.core import TyperGroup

from depthfold.cli import interruption
from depthfold.cli.printing import complain, hush_libraries
from depthfold.errors import DepthfoldError
from depthfold.support.text import one_line

UNEXPECTED, KNOWN = 1, 2
DEBUG = "depthfold.debug"  # in the context's meta, which a command shares with its group


class Group(TyperGroup):
    """Runs a command and turns what it raises into a paragraph and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        with warnings.catch_warnings():
            hush_libraries()
            try:
                return super().invoke(ctx)
            except (typer.Exit, typer.Abort):
                raise
            except (KeyboardInterrupt, Exception) as error:
                if _usage(error):
                    raise
                code = _explain(error)
                if ctx.meta.get(DEBUG):
                    complain("Traceback", "".join(traceback.format_exception(error)), "dim")
        raise typer.Exit(code)


def _explain(error: BaseException) -> int:
    """One paragraph for the error, and the exit code."""
    if isinstance(error, KeyboardInterrupt):
        complain("Interrupted", interruption.WORDS, "bold yellow")
        return interruption.CODE
    if isinstance(error, DepthfoldError):
        complain("Error", str(error), "bold red")
        return KNOWN
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        advice = "Check the path, its permissions and the free space, and run the same command again."
        complain("Error", f"{place}{error.strerror or one_line(error)}. {advice}", "bold red")
        return KNOWN
    told = f"{type(error).__name__}: {one_line(error)} (run it with --debug to see where)"
    complain("Unexpected error", told, "bold red")
    return UNEXPECTED


def _usage(error: BaseException) -> bool:
    """Whether it is typer's own: a wrong option, which it explains itself."""
    return hasattr(error, "exit_code") and hasattr(error, "format_message")
