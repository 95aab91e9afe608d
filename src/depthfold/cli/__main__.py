"""Run `python -m depthfold.cli` like the console script."""

from depthfold.cli import main

main()
