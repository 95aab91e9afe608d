"""Run `python -m depthfold` like the console script."""

from depthfold.cli import main

main()
