"""The command line: parsing and printing. What it does is in `pipeline`."""

from __future__ import annotations

import sys

from depthfold.core.optional import load
from depthfold.errors import MissingDependency


def main() -> None:
    """The console script `depthfold`."""
    try:
        load("typer", "cli")
    except MissingDependency as error:
        sys.exit(f"Error: {error}")
    from depthfold.cli.app import app

    app(prog_name="depthfold")


__all__ = ["main"]
