"""Files that take raw images: the request, the reference that the file is compared with, and its metadata."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from depthfold.backends import Inputs, Layout, RawImages
from depthfold.backends.raw_images import add_normalisation, require_layout
from depthfold.errors import InvalidValue
from depthfold.support.optional import load
from depthfold.tasks import ClassificationTask, Preprocessing, normalise_images
from depthfold.tracing import device_of, dtype_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """The images that a file takes: normalised ones, or raw ones in a layout."""

    preprocessing: Preprocessing
    layout: Layout | None = None

    @property
    def raw(self) -> bool:
        return self.layout is not None

    def metadata(self) -> dict[str, str]:
        """Return what an ONNX file states about its inputs and outputs."""
        found = self.preprocessing
        taken = f"uint8 {self.layout}, normalised in this file" if self.raw else f"NCHW, normalised: {found.formula}"
        return {
            "input": taken, "size": json.dumps(found.size), "mean": json.dumps(found.mean),
            "deviation": json.dumps(found.deviation), "crop_ratio": json.dumps(found.crop_ratio),
            "classes": json.dumps(found.classes),
        }  # fmt: skip

    def wrapped(self, network: nn.Module) -> RawImages:
        """Return the module that is written to the file."""
        return RawImages(network, self.preprocessing.mean, self.preprocessing.deviation, self.layout or "NCHW")

    def add_to(self, path: Path, network: nn.Module) -> None:
        """Change an ONNX file of the network so that it takes raw images."""
        onnx = load("onnx", "onnx")
        model = onnx.load(path)
        add_normalisation(model, self.wrapped(network))
        path.write_bytes(model.SerializeToString())

    def noise(self, network: nn.Module, batch: int) -> Inputs:
        """Return a batch of random raw images, on the device of the network."""
        found = self.preprocessing
        shape = (*found.size, found.channels) if self.layout == "NHWC" else (found.channels, *found.size)
        random = torch.Generator().manual_seed(0)
        images = torch.randint(256, (batch, *shape), generator=random, dtype=torch.uint8)
        return (images.to(device_of(network)),)


class AsInTask(nn.Module):
    """A network behind the task's own preprocessing: the reference for a file that takes raw images."""

    def __init__(self, network: nn.Module, images: Images) -> None:
        super().__init__()
        self.network, self.images = network, images

    def forward(self, raw: Tensor) -> Any:
        raw = raw.movedim(-1, 1) if self.images.layout == "NHWC" else raw
        return self.network(normalise_images(raw, self.images.preprocessing.mean_std).to(dtype_of(self.network)))


def images_of(task: object, layout: object, inputs: Inputs) -> Images | None:
    """Return the images of a classification task, or None for another task.

    Raise InvalidValue if a layout is given, but the task has no raw images of the size of the inputs.
    """
    if layout is None:
        return Images(preprocessing=task.preprocessing) if isinstance(task, ClassificationTask) else None
    if not isinstance(task, ClassificationTask):
        found = "there is none" if task is None else f"found {type(task).__name__}"
        raise InvalidValue(
            f"Raw images are normalised as by a ClassificationTask, and {found}. Pass task=..., or export a module "
            "that wraps the network."
        )
    preprocessing = task.preprocessing
    if not preprocessing.uint8:
        raise InvalidValue(
            "The images of this task are floats, so how they were made from raw images is not known. Use a task with "
            "images of uint8, or leave out raw_images."
        )
    wanted, shapes = (preprocessing.channels, *preprocessing.size), [tuple(tensor.shape[1:]) for tensor in inputs]
    if shapes != [wanted]:
        raise InvalidValue(
            f"The images of the task have the shape {wanted}, and the inputs of the network "
            f"{', '.join(map(str, shapes))}. Give the task the size of the network."
        )
    return Images(preprocessing=preprocessing, layout=require_layout(layout))
