"""The memory format channels_last, of images and of volumes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def channels_last(tensor: Tensor) -> Tensor:
    """Return the tensor with its channels last in memory. Those of other ranks than 4 and 5 are made contiguous."""
    return tensor.contiguous(memory_format=_FORMATS.get(tensor.dim(), torch.contiguous_format))


def set_channels_last(module: nn.Module) -> None:
    """Put the parameters and buffers of rank 4 and 5 into this format, in place.

    Module.to() takes one format for all of them, and fails if a module has tensors of both ranks.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.dim() in _FORMATS:
            tensor.data = tensor.data.to(memory_format=_FORMATS[tensor.dim()])
