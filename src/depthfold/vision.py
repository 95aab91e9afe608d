"""torchvision on a machine whose wheel cannot load its compiled operators.

torchvision's wheels for ARM are built beside CUDA. On a machine without CUDA their compiled library does not load, so
`torchvision::nms` and `torchvision::qnms` are never registered, and `import torchvision` fails when it attaches
meta implementations to them. Declaring the two schemas first is all that the import needs. Models, transforms and
datasets then work; non-maximum suppression itself (the heads of detection models) still has no implementation.

`import depthfold.vision` declares what is missing; after it, `import torchvision` and `import timm` work.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from depthfold.errors import MissingDependency

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
# Kept for the life of the process: a schema is taken back when its library object is collected.
_declared: list[torch.library.Library] = []


def declare_missing_operators() -> tuple[str, ...]:
    """Declare the schemas that torchvision's import needs and nobody has registered. Returns their names."""
    try:
        importlib.import_module("torchvision")
        return ()
    except ImportError:
        return ()  # not installed: nothing to mend
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
    names = []
    for schema in _SCHEMAS:
        library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        library.define(schema)  # type: ignore[no-untyped-call]
        _declared.append(library)
        names.append(schema.split("(")[0])
    return tuple(names)


def import_torchvision() -> ModuleType:
    return _import("torchvision", extra="vision")


def import_timm() -> ModuleType:
    return _import("timm", extra="timm")


def _import(name: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependency(f"{name} is not installed. Install it with: pip install depthfold[{extra}]") from error


declare_missing_operators()
