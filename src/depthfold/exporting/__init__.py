"""Save and load merged networks, and export them to files that run without depthfold."""

from depthfold.exporting.export import Exported, export
from depthfold.exporting.load import load
from depthfold.exporting.save import save

__all__ = ["Exported", "export", "load", "save"]
