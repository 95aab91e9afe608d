"""The average of a model's weights over the steps of its training."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Average:
    """A copy of the model whose parameters follow the trained ones: a = decay * a + (1 - decay) * w after each step.

    Buffers (the statistics of batch norms) are averages already, and are copied.
    """

    __slots__ = ("_pairs", "_source", "decay", "model")

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay
        self._source = model
        # By name, because the copy of an fx graph may order its modules differently; once each, because one parameter
        # may have several names.
        weights = dict(model.named_parameters(remove_duplicate=False))
        copies = dict(self.model.named_parameters(remove_duplicate=False))
        self._pairs = tuple({id(copies[name]): (copies[name], weights[name]) for name in copies}.values())

    @torch.no_grad()
    def update(self) -> None:
        for average, weight in self._pairs:
            average.lerp_(weight, 1 - self.decay)
        self.copy_buffers()

    @torch.no_grad()
    def copy_buffers(self) -> None:
        buffers = dict(self._source.named_buffers(remove_duplicate=False))
        for name, average in self.model.named_buffers(remove_duplicate=False):
            average.copy_(buffers[name])

    def named(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The averages by the names of the model's parameters and buffers."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        own = parameters | dict(self.model.named_buffers(remove_duplicate=False))
        return {name: own[name] for name in names}
