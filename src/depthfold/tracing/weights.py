"""The tensors of a module: their device, their precision and their digest."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from depthfold.support.digest import digest


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, also the buffers that a state dict leaves out. A tensor that has several
    names is under its first."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model: that of its first tensor, and the CPU if it has none."""
    return next((tensor.device for tensor in weights(model).values()), torch.device("cpu"))


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the precision of a model: that of its first floating-point parameter, and float32 if it has none."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def digest_tensors(tensors: Mapping[str, Tensor], document: str = "") -> str:
    """Return the digest of a document, and of the names, dtypes, shapes and bytes of tensors."""
    return digest(document, *(_digest_tensor(name, tensors[name]) for name in sorted(tensors)))


def _digest_tensor(name: str, tensor: Tensor) -> str:
    tensor = tensor.detach().cpu().contiguous()
    return digest(name, str(tensor.dtype), [*tensor.shape], tensor.reshape(-1).view(torch.uint8).numpy().data)
