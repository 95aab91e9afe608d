"""The tensors of a module: their device, dtype and digest."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from depthfold.support.digest import digest


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by their first names, including non-persistent buffers."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the first tensor of a model, or the CPU if it has none."""
    return next((tensor.device for tensor in weights(model).values()), torch.device("cpu"))


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of the first floating-point parameter of a model, or float32 if it has none."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def free_weights(*models: nn.Module) -> None:
    """Free the weights of models that are not needed any more.

    A graph refers to itself, so it stays in memory until the garbage collector runs. On a GPU its weights may be a
    gigabyte, and running the collector may take as long as a training.
    """
    for model in models:
        model.to("meta")


def digest_tensors(tensors: Mapping[str, Tensor], document: str = "") -> str:
    """Return the digest of a document, and of the names, dtypes, shapes and bytes of tensors."""
    return digest(document, *(_digest_tensor(name, tensors[name]) for name in sorted(tensors)))


def _digest_tensor(name: str, tensor: Tensor) -> str:
    tensor = tensor.detach().cpu().contiguous()
    return digest(name, str(tensor.dtype), [*tensor.shape], tensor.reshape(-1).view(torch.uint8).numpy().data)
