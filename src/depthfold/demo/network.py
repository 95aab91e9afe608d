"""The demo's network: a MobileNetV2 in small, for images of 28x28 in grey."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

# Expansion, channels, blocks and stride of each stage, as in the table of the MobileNetV2 paper.
STAGES = ((6, 16, 1, 1), (6, 24, 3, 2), (6, 32, 3, 1))
STEM, HEAD, CLASSES = 16, 128, 10


def small_mobilenet() -> nn.Module:
    """23 convolutions in seven inverted residuals, a stem and a head; 73,000 parameters."""
    channels, blocks = STEM, []
    for expansion, after, number, stride in STAGES:
        for block in range(number):
            blocks.append(InvertedResidual(channels, after, stride if block == 0 else 1, expansion))
            channels = after
    return nn.Sequential(
        nn.Sequential(*_convolution(1, STEM, 3, stride=2)),
        *blocks,
        nn.Sequential(*_convolution(channels, HEAD, 1)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(HEAD, CLASSES),
    )


class InvertedResidual(nn.Module):
    """Expand, filter each channel by itself, project; around it a skip where the shapes allow."""

    def __init__(self, before: int, after: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = before * expansion
        self.body = nn.Sequential(
            *_convolution(before, wide, 1),
            *_convolution(wide, wide, 3, stride=stride, groups=wide),
            nn.Conv2d(wide, after, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.skip = stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return x + out if self.skip else out


def _convolution(before: int, after: int, kernel: int, *, stride: int = 1, groups: int = 1) -> Iterator[nn.Module]:
    yield nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=groups, bias=False)
    yield nn.BatchNorm2d(after)
    yield nn.ReLU6(inplace=True)
