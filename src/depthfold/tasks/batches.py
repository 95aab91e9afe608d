"""The batch of a training step. It depends only on the step, and the next ones are read ahead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from depthfold.errors import InvalidValue
from depthfold.support.text import count
from depthfold.tasks.images import TRIES
from depthfold.tasks.source import BatchRequest, Images, Size, to_device
from depthfold.training import Step, derive_seed


def steps_per_epoch(images: int, batch: int) -> int:
    """Return the number of whole batches, at least one. An incomplete last batch is dropped."""
    return max(1, images // batch)


def batch_indices(step: Step, images: int) -> np.ndarray:
    """Return the indices of this process's part of the batch."""
    batch = min(step.recipe.batch, images)
    epoch, number = divmod(step.number, steps_per_epoch(images, batch))
    whole = _permutation(step.seed, epoch, images)[number * batch : (number + 1) * batch]
    return whole[_part(step, batch)]


def uniform(step: Step, purpose: str, images: int, *shape: int) -> np.ndarray:
    """Return uniform random numbers for this process's part of the batch.

    They are drawn for the whole batch on the CPU, so an image gets the same ones on every device and with any number of
    processes.
    """
    batch = min(step.recipe.batch, images)
    generator = torch.Generator().manual_seed(derive_seed(step.seed, purpose, step.number))
    return torch.rand(batch, *shape, generator=generator, dtype=torch.float64).numpy()[_part(step, batch)]


def _part(step: Step, batch: int) -> slice:
    if batch < step.world_size:
        raise InvalidValue(
            f"A batch of {count(batch, 'image')} cannot be shared by {step.world_size} processes. Use a larger batch, "
            "more images, or fewer processes."
        )
    return slice(batch * step.rank // step.world_size, batch * (step.rank + 1) // step.world_size)


@lru_cache(maxsize=4)  # the current epoch, and the next one when reading ahead
def _permutation(seed: int, epoch: int, images: int) -> np.ndarray:
    generator = torch.Generator().manual_seed(derive_seed(seed, "epoch", epoch))
    return torch.randperm(images, generator=generator).numpy()


class BatchReader:
    """Reads the batches of a training run. Steps can be requested in any order; consecutive ones are read ahead."""

    __slots__ = ("_batches", "_images", "_next", "_size")

    def __init__(self, images: Images, size: Size | None) -> None:
        self._images, self._size = images, size
        self._next: tuple[object, ...] | None = None
        self._batches: Iterator[Tensor] = iter(())

    def batch(self, step: Step) -> tuple[Tensor, Tensor]:
        """Return this process's part of the batch, and the indices of its images, both on the device of the step."""
        if self._state(step) != self._next:
            self._batches = self._images.read(_requests(step, len(self._images)), self._size, step.device)
        self._next = None  # if reading fails, the next step starts over
        images = next(self._batches)
        self._next = self._state(replace(step, number=step.number + 1))
        return images, to_device(batch_indices(step, len(self._images)), step.device)

    @staticmethod
    def _state(step: Step) -> tuple[object, ...]:
        """Return everything that a request depends on."""
        return step.number, step.seed, step.recipe.batch, step.recipe.crop, step.rank, step.world_size, step.device


def _requests(step: Step, images: int) -> Iterator[BatchRequest]:
    """Yield the requests from this step on, without end.

    This is not a method of the reader: a reference cycle would delay the end of the reading processes until garbage
    collection.
    """
    step = replace(step, teacher=None)  # do not keep the teacher alive
    while True:
        crop = uniform(step, "crop", images, TRIES, 4) if step.recipe.crop == "resized" else None
        seed = derive_seed(step.seed, "items", step.number)
        yield BatchRequest(indices=batch_indices(step, images), crop=crop, seed=seed)
        step = replace(step, number=step.number + 1)
