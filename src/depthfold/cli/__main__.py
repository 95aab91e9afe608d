"""`python -m depthfold.cli`, for where the console script is not on the path."""

from depthfold.cli import main

main()
