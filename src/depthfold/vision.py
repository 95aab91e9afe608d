"""Import torchvision and timm, even on machines where torchvision's compiled operators do not load.

torchvision's wheels for ARM are built with CUDA. On a machine without CUDA their compiled library does not load, so
`torchvision::nms` and `torchvision::qnms` are never registered, and `import torchvision` fails when it attaches
meta implementations to them. If their schemas are declared first, the import succeeds. Models, transforms and datasets
then work; non-maximum suppression itself (in detection models) has no implementation.

After `import depthfold.vision`, which declares the schemas, `import torchvision` and `import timm` work.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from depthfold.support.optional import load

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
# Kept for the life of the process: a schema is removed when its library object is collected.
_declared: list[torch.library.Library] = []


def declare_missing_operators() -> tuple[str, ...]:
    """Declare the schemas that torchvision's import needs, unless they are registered. Return the declared names."""
    try:
        importlib.import_module("torchvision")
        return ()
    except ImportError:
        return ()  # not installed
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
    """Return torchvision, also if its compiled operators do not load. Raise MissingDependency if it is missing."""
    return load("torchvision", "vision")


def import_timm() -> ModuleType:
    """Return timm, also if torchvision's compiled operators do not load. Raise MissingDependency if it is missing."""
    return load("timm", "timm")


declare_missing_operators()
