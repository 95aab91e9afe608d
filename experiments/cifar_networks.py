"""Networks for 32x32 images and ten classes, used by several experiments."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import depthfold as df
from depthfold.tracing import TracedNetwork
from depthfold.vision import import_torchvision


def mobilenet_v2(seed: int = 0, width: float = 1.0) -> nn.Module:
    """Return MobileNetV2 with random weights; stem and second stage have no stride."""
    torch.manual_seed(seed)
    model = import_torchvision().models.mobilenet_v2(weights=None, num_classes=10, width_mult=width)
    model.features[0][0].stride = (1, 1)
    for module in model.features[2].modules():
        if isinstance(module, nn.Conv2d):
            module.stride = (1, 1)
    return model  # type: ignore[no-any-return]


def vgg19_bn(seed: int = 0) -> nn.Module:
    """Return VGG19-BN with random weights, and one linear layer after its convolutions."""
    torch.manual_seed(seed)
    model = import_torchvision().models.vgg19_bn(weights=None, num_classes=10)
    model.avgpool, model.classifier = nn.Identity(), nn.Linear(512, 10)
    return model  # type: ignore[no-any-return]


def trace_for_cifar(model: nn.Module, batch: int = 1) -> TracedNetwork:
    """Trace MobileNetV2 without its stem and its head: 50 layers, 345 blocks."""
    return df.trace(model, torch.randn(batch, 3, 32, 32), ignore=["features.0", "features.18"])


def save_base(model: nn.Module, path: Path) -> None:
    """Save the weights, those of convolutions and linear layers in float16, the rest as they are."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    half = {name: tensor.half() if tensor.dim() > 1 else tensor for name, tensor in tensors.items()}
    save_file(half, path)


def load_base(path: Path, model: nn.Module | None = None) -> nn.Module:
    """Return a network, by default MobileNetV2-1.0, with saved weights in float32 and in evaluation mode."""
    model = mobilenet_v2() if model is None else model
    tensors = load_file(path)
    model.load_state_dict({n: t.float() if t.is_floating_point() else t for n, t in tensors.items()})
    return model.eval()


class BasicBlock(nn.Module):
    """Two convolutions and a skip. Where the size changes, the skip takes every second pixel and adds zero channels."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.stride, self.more = stride, channels - channels_in

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.more:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.more // 2, self.more // 2))
        return F.relu(y + x)


class CifarResNet(nn.Module):
    """The residual network for CIFAR-10 of He et al., with the names of weights that are published for it."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1, self.layer2, self.layer3 = (
            nn.Sequential(
                *(BasicBlock(first if n == 0 else channels, channels, stride if n == 0 else 1) for n in range(blocks))
            )
            for first, channels, stride in ((16, 16, 1), (16, 32, 2), (32, 64, 2))
        )
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean((2, 3)))


def load_resnet56(path: Path) -> nn.Module:
    """Return ResNet-56 with the weights of github.com/akamaster/pytorch_resnet_cifar10 (resnet56-4bfd9763.th)."""
    model = CifarResNet(9)
    weights = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    found = model.load_state_dict(
        {name.removeprefix("module."): tensor for name, tensor in weights.items()}, strict=False
    )
    assert not found.unexpected_keys and all("num_batches" in name for name in found.missing_keys), found
    return model.eval()
