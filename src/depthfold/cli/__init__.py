"""The command line: parsing and printing. What it does is in `pipeline`."""

from __future__ import annotations

import sys

from depthfold.cli.encoding import spell_out
from depthfold.cli.interruption import expect_interruption


def main() -> None:
    """The console script `depthfold`."""
    expect_interruption()  # before anything that takes its time to import
    spell_out()
    from depthfold.errors import MissingDependency
    from depthfold.support.optional import load

    try:
        load("typer", "cli")
    except MissingDependency as error:
        sys.exit(f"Error: {error}")
    from depthfold.cli.app import app

    app(prog_name="depthfold")


__all__ = ["main"]
