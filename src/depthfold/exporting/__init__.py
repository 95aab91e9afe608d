"""Save and load merged networks, and export them to files that run without depthfold."""

from depthfold.exporting.export import FORMATS, Exported, export, inputs_of_file, positional_tensors
from depthfold.exporting.int8 import Int8, Quantised
from depthfold.exporting.load import load, read_config
from depthfold.exporting.raw import Images, images_of
from depthfold.exporting.save import save

__all__ = [
    "FORMATS",
    "Exported",
    "Images",
    "Int8",
    "Quantised",
    "export",
    "images_of",
    "inputs_of_file",
    "load",
    "positional_tensors",
    "read_config",
    "save",
]
