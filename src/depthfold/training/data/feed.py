"""The feed: batches of images, step after step, read ahead as long as the steps follow one another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from depthfold.training.data.collection import Pictures, Request, Size
from depthfold.training.data.geometry import TRIES
from depthfold.training.data.order import indices_of, uniform
from depthfold.training.task import Step


class Feed:
    """Where a training has got to in its pictures. Any step can be asked for at any time; the one after the last is
    read already."""

    __slots__ = ("_batches", "_next", "_pictures", "_size")

    def __init__(self, pictures: Pictures, size: Size | None) -> None:
        self._pictures, self._size = pictures, size
        self._next: tuple[object, ...] | None = None
        self._batches: Iterator[Tensor] = iter(())

    def batch(self, step: Step) -> tuple[Tensor, Tensor]:
        """The images of the step, and their indices, both on its device; this process's part of them."""
        if self._state(step) != self._next:
            self._batches = self._pictures.read(_requests(step, len(self._pictures)), self._size, step.device)
        self._next = None  # if reading fails, the next step starts afresh
        images = next(self._batches)
        self._next = self._state(replace(step, number=step.number + 1))
        indices = indices_of(step, len(self._pictures))
        return images, torch.from_numpy(indices).to(step.device, non_blocking=True)

    @staticmethod
    def _state(step: Step) -> tuple[object, ...]:
        """All that a request depends on."""
        return step.number, step.seed, step.recipe.batch, step.recipe.crop, step.rank, step.world, step.device


def _requests(step: Step, images: int) -> Iterator[Request]:
    """From this step on, without end. Knows no feed: a circle would leave it to the garbage collector to stop the
    processes that read, which takes it seconds."""
    step = replace(step, teacher=None)  # a network that nobody else may need any more
    while True:
        crop = uniform(step, "crop", images, TRIES, 4) if step.recipe.crop == "resized" else None
        yield Request(indices=indices_of(step, images), crop=crop)
        step = replace(step, number=step.number + 1)
