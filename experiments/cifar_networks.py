"""Networks for 32x32 images and ten classes, used by several experiments."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import depthfold as df
from depthfold.tracing import TracedNetwork
from depthfold.vision import import_torchvision


def mobilenet_v2(seed: int = 0) -> nn.Module:
    """Return MobileNetV2-1.0 with random weights; stem and second stage have no stride."""
    torch.manual_seed(seed)
    model = import_torchvision().models.mobilenet_v2(weights=None, num_classes=10)
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


def load_base(path: Path) -> nn.Module:
    """Return MobileNetV2 with saved weights, in float32 and in evaluation mode."""
    model = mobilenet_v2()
    tensors = load_file(path)
    model.load_state_dict({n: t.float() if t.is_floating_point() else t for n, t in tensors.items()})
    return model.eval()
