"""The command line, whole: importing its modules registers the commands, in the order in which --help shows them."""

from depthfold.cli import stage_commands, whole_commands
from depthfold.cli.root import app

__all__ = ["app", "stage_commands", "whole_commands"]
