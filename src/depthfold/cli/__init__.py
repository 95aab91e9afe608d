"""The command line: options and output. The work is done in `settings` and `pipeline`."""

from __future__ import annotations

import sys

from depthfold.cli import terminal


def main() -> None:
    """Run the console script `depthfold`."""
    terminal.exit_on_interrupt()  # before the slow imports
    terminal.replace_unknown_characters()
    from depthfold.errors import MissingDependency
    from depthfold.support.optional import load

    try:
        for library in ("typer", "tomli_w"):
            load(library, "cli")
    except MissingDependency as error:
        sys.exit(f"Error: {error}")
    from depthfold.cli.commands import app

    app(prog_name="depthfold")


__all__ = ["main"]
