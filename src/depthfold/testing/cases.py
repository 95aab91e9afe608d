"""The networks that the conformance suite of backends runs."""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor, nn

from depthfold.merging import merge
from depthfold.rewriting import rewrite
from depthfold.testing.networks import Block, Conv, NetworkSpec, SmallCNN
from depthfold.testing.plans import random_plan, randomise_statistics
from depthfold.tracing import trace

Inputs = tuple[Tensor, ...]
Case = tuple[nn.Module, Inputs]


def backend_cases() -> dict[str, Case]:
    """Small networks of the kinds that tables and merged networks are made of, in training mode, as a user's may be."""
    with torch.random.fork_rng(devices=()):  # the random numbers of the caller stay as they are
        torch.manual_seed(0)
        cases = _networks()
    generator = torch.Generator().manual_seed(1)
    sample = torch.randn(2, 4, 15, 14, generator=generator)
    return {name: (randomise_statistics(module).train(), (sample.clone(),)) for name, module in cases.items()}


def _networks() -> dict[str, nn.Module]:
    return {
        "convolution": nn.Conv2d(4, 6, 3, padding=1),
        "convolution and ReLU6": nn.Sequential(nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.ReLU6()),
        "depth-wise": nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        "dilated, not square": nn.Conv2d(4, 2, (3, 5), padding=(2, 4), dilation=2),
        "padding not symmetric": SmallCNN(_spec(_conv(6, padding=((0, 2), (1, 0))))),
        "residual": SmallCNN(_spec(Block(items=(_conv(8), _conv(4)), skip="identity", activation="function"))),
        "merged": _merged(),
    }


def _conv(out: int, padding: tuple[tuple[int, int], ...] = ((1, 1), (1, 1))) -> Conv:
    return Conv(out=out, kernel=(3, 3), stride=(1, 1), padding=padding, dilation=(1, 1))


def _spec(*items: Conv | Block) -> NetworkSpec:
    return NetworkSpec(channels=4, size=(15, 14), parts=(Block(items=items),))


def _merged() -> nn.Module:
    deep = randomise_statistics(
        SmallCNN(_spec(_conv(8), _conv(8), Block(items=(_conv(8),), skip="identity"), _conv(4)))
    )
    traced = trace(deep, (torch.randn(2, 4, 15, 14),))
    return merge(rewrite(traced, random_plan(traced.network, Random(3))))
