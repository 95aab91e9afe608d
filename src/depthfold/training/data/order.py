"""Which images a step sees. It follows from the step alone."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from depthfold.core.wording import count
from depthfold.errors import InvalidValue
from depthfold.training.task import Step, mix


def steps_per_epoch(images: int, batch: int) -> int:
    """The last batch of an epoch is dropped if it is not a whole one; fewer images than a batch are one batch."""
    return max(1, images // batch)


def indices_of(step: Step, images: int) -> np.ndarray:
    """This process's part of the step's batch, by index."""
    batch = min(step.recipe.batch, images)
    epoch, place = divmod(step.number, steps_per_epoch(images, batch))
    whole = _permutation(step.seed, epoch, images)[place * batch : (place + 1) * batch]
    return whole[_part(step, batch)]


def uniform(step: Step, purpose: str, images: int, *shape: int) -> np.ndarray:
    """Uniform numbers for this process's part of the step's batch.

    They are drawn for the whole batch, on the CPU: an image gets the same ones on every device, and however many
    processes share the batch.
    """
    batch = min(step.recipe.batch, images)
    generator = torch.Generator().manual_seed(mix(step.seed, purpose, step.number))
    return torch.rand(batch, *shape, generator=generator, dtype=torch.float64).numpy()[_part(step, batch)]


def _part(step: Step, batch: int) -> slice:
    if batch < step.world:
        raise InvalidValue(
            f"A batch of {count(batch, 'image')} cannot be shared by {step.world} processes. Use a larger batch, more "
            "images, or fewer processes."
        )
    return slice(batch * step.rank // step.world, batch * (step.rank + 1) // step.world)


@lru_cache(maxsize=4)  # an epoch's steps use one, and those that are read ahead the next
def _permutation(seed: int, epoch: int, images: int) -> np.ndarray:
    generator = torch.Generator().manual_seed(mix(seed, "epoch", epoch))
    return torch.randperm(images, generator=generator).numpy()
