"""The network of the demo, a small MobileNetV2 for grey images of 28x28, and its images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from depthfold.tasks import ClassificationTask

SHIPPED = Path(__file__).parent / "shipped"  # its README.md says where the files come from

# Expansion, channels, blocks and stride of each stage, in the notation of the MobileNetV2 paper.
STAGES = ((1, 16, 1, 1), (12, 16, 9, 2))
STEM, HEAD, CLASSES = 16, 128, 10


class SmallMobileNet(nn.Sequential):
    """31 convolutions in ten inverted residuals, a stem and a head; 82,000 parameters.

    `drop` is the rate of stochastic depth in training: the last residual is dropped for an image with this
    probability, earlier ones with a linearly smaller one.
    """

    def __init__(self, drop: float = 0.0) -> None:
        channels = STEM
        blocks: list[nn.Module] = []
        depth = sum(number for _, _, number, _ in STAGES)
        for expansion, after, number, stride in STAGES:
            for block in range(number):
                share = (len(blocks) + 1) / depth
                blocks.append(InvertedResidual(channels, after, stride if block == 0 else 1, expansion, drop * share))
                channels = after
        super().__init__(
            nn.Sequential(*_convolution(1, STEM, 3, stride=2)),
            *blocks,
            nn.Sequential(*_convolution(channels, HEAD, 1)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(HEAD, CLASSES),
        )


def task() -> ClassificationTask:
    """Return the task: 10,000 training images of Fashion-MNIST, 200 of them held out, and 5,000 test images."""
    return ClassificationTask.fashion_mnist(SHIPPED, holdout=0.02)


def small_mobilenet() -> nn.Module:
    """Return the network with random weights."""
    return SmallMobileNet()


class InvertedResidual(nn.Module):
    """Expansion, depthwise convolution and projection, with a skip if the shapes allow it."""

    def __init__(self, before: int, after: int, stride: int, expansion: int, drop: float) -> None:
        super().__init__()
        wide = before * expansion
        self.body = nn.Sequential(
            *(_convolution(before, wide, 1) if expansion > 1 else ()),
            *_convolution(wide, wide, 3, stride=stride, groups=wide),
            nn.Conv2d(wide, after, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.skip = stride == 1 and before == after
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        if not self.skip:
            return out
        if self.training and self.drop:
            kept = torch.rand(len(out), 1, 1, 1, device=out.device) >= self.drop
            out = out * kept / (1 - self.drop)
        return x + out


def _convolution(before: int, after: int, kernel: int, *, stride: int = 1, groups: int = 1) -> Iterator[nn.Module]:
    yield nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=groups, bias=False)
    yield nn.BatchNorm2d(after)
    yield nn.ReLU6(inplace=True)
