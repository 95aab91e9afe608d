"""Results: a shallow network in a folder of its own, and as a file that runs without depthfold."""

from depthfold.exporting.export import Exported, export
from depthfold.exporting.load import load
from depthfold.exporting.save import save

__all__ = ["Exported", "export", "load", "save"]
