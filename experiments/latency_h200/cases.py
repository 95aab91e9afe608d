"""The cases of experiments/latency_h200/measure.py: three networks in three precisions on three runtimes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import depthfold as df
from depthfold.backends.inductor import Inductor
from depthfold.backends.pytorch import PyTorch
from depthfold.tracing import TracedNetwork
from depthfold.vision import import_torchvision

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from latency import STEM_AND_HEAD

# Whether to use channels-last, as a user would: it is faster in float16 and TF32.
PRECISIONS = {"float32": False, "tf32": True, "float16": True}
NETWORKS = ("mobilenetv2-1.0", "mobilenetv2-1.4", "vgg19-bn")
RUNTIMES = {"pytorch": {}, "pytorch with CUDA graphs": {"cuda_graphs": True}, "inductor": {}}


def build(name: str, batch: int, size: int) -> TracedNetwork:
    models = import_torchvision().models
    x = torch.randn(batch, 3, size, size)
    torch.manual_seed(0)
    if name == "vgg19-bn":
        return df.trace(models.vgg19_bn(weights=None).eval(), x)
    width = float(name.rpartition("-")[2])
    return df.trace(models.mobilenet_v2(weights=None, width_mult=width).eval(), x, ignore=STEM_AND_HEAD)


def every_block_merged(network: df.Network) -> df.Plan:
    """Return the plan that merges every block, with an activation after each.

    Inverted residuals end where the network has no activation, the stages of VGG at its barriers.
    """
    own = network.activations
    ends = sorted({l for l in range(1, network.depth) if l not in own} | set(network.barriers))
    return df.Plan(activations=[*ends, network.depth], cuts=ends)


@dataclass(frozen=True)
class Case:
    """One network in one precision on one runtime."""

    name: str
    precision: str
    runtime: str
    batch: int
    size: int
    backend: PyTorch | Inductor

    @property
    def key(self) -> str:
        return f"{self.name} {self.precision} {self.runtime}"

    def file(self, folder: Path, suffix: str) -> Path:
        return folder / (self.key.replace(" ", "_") + suffix)


def cases(options: argparse.Namespace) -> Iterator[Case]:
    batches = dict(zip(NETWORKS, (options.batches[0], *options.batches), strict=True))
    for runtime in RUNTIMES:
        for name in NETWORKS:
            for precision, channels_last in PRECISIONS.items():
                if options.device == "cpu" and (precision != "float32" or runtime == "pytorch with CUDA graphs"):
                    continue
                same = dict(device=options.device, precision=precision, channels_last=channels_last)
                backend = Inductor(**same) if runtime == "inductor" else PyTorch(**same, **RUNTIMES[runtime])
                yield Case(name, precision, runtime, batches[name], options.size, backend)
