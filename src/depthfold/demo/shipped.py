"""What ships with the demo: trained weights, images, and an importance table. shipped/README.md says where from."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
from torch import nn

from depthfold.core import ImportanceTable
from depthfold.demo.network import small_mobilenet
from depthfold.tasks import ClassificationTask

SHIPPED = Path(__file__).parent / "shipped"
WEIGHTS = SHIPPED / "weights.safetensors"
IMPORTANCE = SHIPPED / "importance.json"


def model() -> nn.Module:
    """The small MobileNetV2, trained on Fashion-MNIST, in evaluation mode."""
    network = small_mobilenet()
    network.load_state_dict(safetensors.torch.load_file(WEIGHTS))
    return network.eval()


def task() -> ClassificationTask:
    """10,000 training and 5,000 test images of Fashion-MNIST."""
    return ClassificationTask.fashion_mnist(SHIPPED)


def importance() -> ImportanceTable:
    """What every block of the network is worth, as we measured it once."""
    return ImportanceTable.loads(IMPORTANCE.read_text(encoding="utf-8"))
