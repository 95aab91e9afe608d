"""Random plans for any network, and weights that are not fresh."""

from __future__ import annotations

from random import Random

import torch
from torch import nn

from depthfold.core import Network, Plan
from depthfold.core.space import Space


def random_plan(network: Network, rng: Random, space: Space = "full", largest: int = 4_000_000) -> Plan:
    """A plan drawn at random: cuts along a random walk over the spans of the space, activations at some of them.

    `largest` bounds the parameters of a merged convolution: the full space of a deep network holds kernels that no
    memory holds. Spans of a single layer are always taken.
    """
    following: dict[int, list[int]] = {}
    for span in network.spans(space):
        if len(span) == 1 or network.merged_shape(span).parameters <= largest:
            following.setdefault(span.i, []).append(span.j)
    position, cuts = 0, []  # a single layer crosses nothing, so there is always a way on
    while position < network.depth:
        position = rng.choice(following[position])
        cuts.append(position)
    cuts = cuts[:-1]
    kept = [cut for cut in cuts if rng.random() < 0.6]
    if network.depth and rng.random() < 0.5:
        kept.append(network.depth)
    return Plan(activations=kept if network.activations else (), cuts=cuts)


def randomise_statistics(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give every batch norm of the model random statistics and affine parameters: fresh ones hide mistakes."""
    generator = torch.Generator().manual_seed(seed)

    def fill(tensor: torch.Tensor | None, low: float, high: float) -> None:
        if tensor is not None:
            values = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * (high - low) + low
            tensor.data.copy_(values)

    for module in model.modules():
        if isinstance(getattr(module, "running_var", None), torch.Tensor):
            fill(module.running_mean, -0.5, 0.5)  # type: ignore[arg-type]
            fill(module.running_var, 0.5, 2.0)  # type: ignore[arg-type]
            fill(module.weight, 0.5, 1.5)  # type: ignore[arg-type]
            fill(module.bias, -0.5, 0.5)  # type: ignore[arg-type]
    return model
