"""What an ONNX file says of itself: which network it is and by which plan, and not where it was made."""

from __future__ import annotations

import json
from pathlib import Path

from depthfold.backends.base import reasons
from depthfold.core import Plan
from depthfold.core.document import encode
from depthfold.core.optional import load
from depthfold.merging.verification import Shallow
from depthfold.version import __version__


def finish_onnx(path: Path, remembered: Shallow) -> None:
    """Put name, plan and version into the file's metadata, and let ONNX's own checker look at all of it."""
    onnx = load("onnx", "onnx")
    with reasons("The ONNX file is not valid"):
        model = onnx.load(path)
        graph = model.graph
        # PyTorch's exporter notes with every operation the lines of source that it came from, with their folders.
        for noted in (
            *graph.node,
            *graph.input,
            *graph.output,
            *graph.value_info,
            *graph.initializer,
            *model.functions,
        ):
            del noted.metadata_props[:]
        plan = Plan(remembered.plan.activations, remembered.plan.cuts)
        notes = {"name": remembered.blueprint.network.name, "plan": json.dumps(encode(plan)), "depthfold": __version__}
        onnx.helper.set_model_props(model, notes)
        onnx.checker.check_model(model, full_check=True)
        path.write_bytes(model.SerializeToString())
