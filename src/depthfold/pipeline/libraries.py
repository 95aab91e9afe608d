"""Optional libraries that a run will need at its end, asked for at its beginning."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from depthfold.core.optional import load

# What the files of each suffix are written and checked with; pip's extras have the same names.
_WANTS = {
    ".onnx": (("onnx", "onnx"), ("onnxruntime", "onnx")),
    ".xml": (("onnx", "openvino"), ("openvino", "openvino")),
    ".engine": (("onnx", "tensorrt"), ("tensorrt", "tensorrt")),
}


def check_libraries(exports: Iterable[str]) -> None:
    """Raise MissingDependency now for what would be missing after hours of training: exporters, and the report's
    plots."""
    for name in exports:
        for library, extra in _WANTS.get(Path(name).suffix, ()):
            load(library, extra)
    load("plotly", "report")
