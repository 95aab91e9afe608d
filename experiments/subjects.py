"""The networks that are compared on CIFAR-10: how each is built, traced, trained, normalised and timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cifar_networks import load_base, load_resnet56, mobilenet_v2, vgg19_bn
from gpu_runs import ON_CARD
from torch import nn

import depthfold as df
from depthfold.backends.pytorch import PyTorch
from depthfold.tracing import TracedNetwork
from depthfold.training import Recipe

# The published weights of ResNet-56 were trained with images that are normalised like those of ImageNet.
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
STEM_AND_HEAD = ("features.0", "features.18")
# How the networks without published weights are trained.
BASE = Recipe(epochs=160, lr=0.3, warmup=435, weight_decay=5e-4, **ON_CARD)


@dataclass(frozen=True)
class Subject:
    """A network of the experiments. `build` is None if others published its weights."""

    name: str
    build: Callable[[], nn.Module] | None
    ignore: tuple[str, ...] = ()
    base: Recipe = BASE
    normalise: Any = None

    def load(self, weights: Path) -> nn.Module:
        return load_resnet56(weights) if self.build is None else load_base(weights, self.build())

    def trace(self, model: nn.Module, batch: int = 1) -> TracedNetwork:
        return df.trace(model, torch.randn(batch, 3, 32, 32), ignore=self.ignore)

    def task(self, data: Path) -> df.ClassificationTask:
        return df.ClassificationTask.cifar10(data, score_batch=2500, normalise=self.normalise)


SUBJECTS = {
    subject.name: subject
    for subject in (
        Subject("mobilenet_v2", mobilenet_v2, STEM_AND_HEAD),
        Subject("mobilenet_v2_1.4", lambda: mobilenet_v2(width=1.4), STEM_AND_HEAD),
        Subject("vgg19_bn", vgg19_bn, base=BASE.replace(lr=0.1)),
        Subject("resnet56", None, normalise=IMAGENET),
    )
}


def target(device: str) -> PyTorch:
    """Return the stopwatch: PyTorch with TF32 and CUDA graphs, or on a CPU for a dry run."""
    if device == "cpu":
        return PyTorch()
    return PyTorch(device="cuda", precision="tf32", channels_last=True, cuda_graphs=True)


def timed_batch(device: str) -> int:
    return 2 if device == "cpu" else 512
