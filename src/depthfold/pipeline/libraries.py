"""Optional libraries that a run will need at its end, asked for at its beginning."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from depthfold.jobs import Executor, Processes, RayCluster
from depthfold.support.optional import load

# What the files of each suffix are written and checked with; pip's extras have the same names.
_WANTS = {
    ".onnx": (("onnx", "onnx"), ("onnxruntime", "onnx")),
    ".xml": (("onnx", "openvino"), ("openvino", "openvino")),
    ".engine": (("onnx", "tensorrt"), ("tensorrt", "tensorrt")),
}


# What an executor sends its jobs with.
_CREWS = {Processes: ("cloudpickle", "processes"), RayCluster: ("ray", "ray")}


def check_libraries(exports: Iterable[str], executor: Executor | None) -> None:
    """Raise MissingDependency now for what would be missing after hours of measuring and training: what trains and
    keeps checkpoints, what runs the trainings (None: there are none, or they run here), the exporters, and the
    report's templates."""
    load("accelerate.state", "train")
    load("safetensors.torch", "train")
    for kind, wanted in _CREWS.items():
        if isinstance(executor, kind):
            load(*wanted)
    for name in exports:
        for library, extra in _WANTS.get(Path(name).suffix, ()):
            load(library, extra)
    load("jinja2", "report")
