"""Networks of the zoo that no package ships, written in the usual style of published code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Input sizes for tracing, without the batch dimension.
CIFAR = (3, 32, 32)
WAVEFORM = (1, 8000)  # half a second at 16 kHz
CEPSTRA = (40, 101)  # 40 coefficients as channels, one frame every 10 ms
IMAGE = (3, 65, 65)
SMALL_IMAGE = (1, 17, 20)


# ResNet-56 for CIFAR-10, option A: the shortcut of a stage subsamples by two and pads with zero channels.


class Lambda(nn.Module):
    """A function wrapped as a module, as ports of this network write the shortcut."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def option_a(added: int) -> Lambda:
    return Lambda(lambda x: F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, added // 2, added // 2), "constant", 0))


class CifarBlock(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.shortcut = nn.Sequential() if inner == outer and stride == 1 else option_a(outer - inner)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class CifarResNet(nn.Module):
    def __init__(self, blocks: int = 9, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = self._stage(16, 16, blocks, 1)
        self.layer2 = self._stage(16, 32, blocks, 2)
        self.layer3 = self._stage(32, 64, blocks, 2)
        self.linear = nn.Linear(64, classes)

    def _stage(self, inner: int, outer: int, blocks: int, stride: int) -> nn.Sequential:
        rest = [CifarBlock(outer, outer, 1) for _ in range(blocks - 1)]
        return nn.Sequential(CifarBlock(inner, outer, stride), *rest)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.layer3(self.layer2(self.layer1(out)))
        out = F.avg_pool2d(out, out.size()[3])
        return self.linear(out.view(out.size(0), -1))


# Keyword spotting: M5 takes the waveform, TC-ResNet the coefficients as channels. Both convolve over time only.


class M5(nn.Module):
    def __init__(self, classes: int = 35, width: int = 32) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(1, width, kernel_size=80, stride=16)
        self.bn1 = nn.BatchNorm1d(width)
        self.pool1 = nn.MaxPool1d(4)
        self.conv2 = nn.Conv1d(width, width, kernel_size=3)
        self.bn2 = nn.BatchNorm1d(width)
        self.conv3 = nn.Conv1d(width, 2 * width, kernel_size=3)
        self.bn3 = nn.BatchNorm1d(2 * width)
        self.pool3 = nn.MaxPool1d(4)
        self.conv4 = nn.Conv1d(2 * width, 2 * width, kernel_size=3)
        self.bn4 = nn.BatchNorm1d(2 * width)
        self.fc1 = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool1(F.relu(self.bn1(self.conv1(x))))
        x = F.relu(self.bn2(self.conv2(x)))
        x = self.pool3(F.relu(self.bn3(self.conv3(x))))
        x = F.relu(self.bn4(self.conv4(x)))
        x = F.avg_pool1d(x, x.shape[-1]).permute(0, 2, 1)
        return F.log_softmax(self.fc1(x), dim=2)


class TemporalBlock(nn.Module):
    def __init__(self, inner: int, outer: int, kernel: int = 9) -> None:
        super().__init__()
        stride = 1 if inner == outer else 2
        self.conv1 = nn.Conv1d(inner, outer, kernel, stride, kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm1d(outer)
        self.conv2 = nn.Conv1d(outer, outer, kernel, 1, kernel // 2, bias=False)
        self.bn2 = nn.BatchNorm1d(outer)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride == 2:
            projection = nn.Conv1d(inner, outer, 1, stride, bias=False)
            self.downsample = nn.Sequential(projection, nn.BatchNorm1d(outer), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(out)) + shortcut)


class TCResNet8(nn.Module):
    def __init__(self, classes: int = 12, widths: tuple[int, ...] = (16, 24, 32, 48)) -> None:
        super().__init__()
        self.conv0 = nn.Conv1d(40, widths[0], 3, 1, 1, bias=False)
        self.blocks = nn.Sequential(*map(TemporalBlock, widths[:-1], widths[1:]))
        self.pool = nn.AdaptiveAvgPool1d(1)
        self.dropout = nn.Dropout(0.5)
        self.fc = nn.Conv1d(widths[-1], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.dropout(self.pool(self.blocks(self.conv0(x))))).squeeze(-1)


# ESPCN: a few layers at the low resolution, then a pixel shuffle.


class ESPCN(nn.Module):
    def __init__(self, scale: int = 3, channels: int = 1) -> None:
        super().__init__()
        self.first_part = nn.Sequential(
            nn.Conv2d(channels, 64, 5, padding=2), nn.Tanh(), nn.Conv2d(64, 32, 3, padding=1), nn.Tanh()
        )
        self.last_part = nn.Sequential(
            nn.Conv2d(32, channels * scale**2, 3, padding=1), nn.PixelShuffle(scale), nn.Sigmoid()
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.last_part(self.first_part(x))


# As in detection libraries: a convolution that includes its norm and activation and calls F.conv2d itself.


class FrozenNorm(nn.Module):
    """A batch norm whose parameters are all buffers, computed as a scale and a shift."""

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((channels,), value))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale.reshape(1, -1, 1, 1) + shift.reshape(1, -1, 1, 1)


class WrappedConv2d(nn.Conv2d):
    def __init__(self, *args: Any, norm: nn.Module | None = None, activation: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.norm = norm
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)
        if self.norm is not None:
            x = self.norm(x)
        if self.activation is not None:
            x = self.activation(x)
        return x


class WrappedBottleneck(nn.Module):
    def __init__(self, inner: int, width: int, outer: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.shortcut: nn.Module | None = None
        if inner != outer:
            self.shortcut = WrappedConv2d(inner, outer, 1, stride=stride, bias=False, norm=norm(outer))
        self.conv1 = WrappedConv2d(inner, width, 1, bias=False, norm=norm(width), activation=F.relu_)
        self.conv2 = WrappedConv2d(
            width, width, 3, stride=stride, padding=1, bias=False, norm=norm(width), activation=F.relu_
        )
        self.conv3 = WrappedConv2d(width, outer, 1, bias=False, norm=norm(outer))

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv3(self.conv2(self.conv1(x)))
        out += x if self.shortcut is None else self.shortcut(x)
        return F.relu_(out)


class WrappedResNet(nn.Module):
    """A small backbone with a top-down pyramid; returns a dict of outputs."""

    def __init__(self, norm: Callable[[int], nn.Module], widths: tuple[int, ...] = (16, 32, 64), blocks: int = 2):
        super().__init__()
        self.stem = WrappedConv2d(3, 32, 7, stride=2, padding=3, bias=False, norm=norm(32), activation=F.relu_)
        self.stages, self.lateral, self.smooth = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        inner = 32
        for n, width in enumerate(widths):
            first = WrappedBottleneck(inner, width, 4 * width, 1 if n == 0 else 2, norm)
            inner = 4 * width
            rest = [WrappedBottleneck(inner, width, inner, 1, norm) for _ in range(blocks - 1)]
            self.stages.append(nn.Sequential(first, *rest))
            self.lateral.append(WrappedConv2d(inner, 32, 1))
            self.smooth.append(WrappedConv2d(32, 32, 3, padding=1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = F.max_pool2d(self.stem(x), kernel_size=3, stride=2, padding=1)
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        outputs: dict[str, Tensor] = {}
        above: Tensor | None = None
        for n in reversed(range(len(maps))):
            here = self.lateral[n](maps[n])
            above = here if above is None else here + F.interpolate(above, size=here.shape[-2:], mode="nearest")
            outputs[f"p{n + 2}"] = self.smooth[n](above)
        return outputs


# By name: a function that builds the network, and its input size.
OTHERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "others/resnet56_option_a": (CifarResNet, CIFAR),
    "others/m5": (M5, WAVEFORM),
    "others/tc_resnet8": (TCResNet8, CEPSTRA),
    "others/espcn": (ESPCN, SMALL_IMAGE),
    "others/wrapped_resnet": (lambda: WrappedResNet(nn.BatchNorm2d), IMAGE),
    "others/wrapped_resnet_frozen": (lambda: WrappedResNet(FrozenNorm), IMAGE),
}
