"""What a task has loaded in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from depthfold.errors import DataError, InvalidValue
from depthfold.support.text import count
from depthfold.tasks.collection import Pictures, Request, Size, Source, split_off
from depthfold.tasks.pictures import TRIES
from depthfold.training.task import Split, Step, mix

# Which images a step sees. It follows from the step alone.


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


# The feed: batches of images, step after step, read ahead as long as the steps follow one another.


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


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Subset:
    """Pictures to train on or to score, and their labels."""

    pictures: Pictures
    labels: Tensor
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)


class Loaded:
    """A source and how it is split and seen. Everything is read on first use and kept; the test set is read for its
    own score alone. What has been read does not travel, but for the title: in another process it is read there."""

    __slots__ = ("_holdout", "_kept", "_seed", "_size", "_source")

    def __init__(
        self, source: Source, size: Size | None, holdout: float | int, seed: int, title: str | None = None
    ) -> None:
        self._source, self._size, self._holdout, self._seed = source, size, holdout, seed
        self._kept: dict[object, Any] = {} if title is None else {"title": title}

    def __reduce__(self) -> tuple[type[Loaded], tuple[object, ...]]:
        return Loaded, (self._source, self._size, self._holdout, self._seed, self._kept.get("title"))

    @property
    def title(self) -> str:
        """Which dataset it is; a title takes a look at the data, and is asked for often."""
        return self._once("title", lambda: self._source.title)

    @property
    def train(self) -> Subset:
        """What there is to train on, where it lies."""
        return self._once("split", self._split)[0]

    def feed(self, *, cropped: bool) -> Feed:
        """The training set step by step; `cropped`: random parts of the images."""
        return self._once(("feed", cropped), lambda: Feed(self._settled(self.train, cropped).pictures, self._size))

    def labels_on(self, device: torch.device) -> Tensor:
        """The labels of the training set."""
        return self._once(("labels", device), lambda: self.train.labels.to(device))

    def scored(self, split: Split) -> Subset:
        """The part to score, in memory where it fits."""
        return self._once(split, lambda: self._settled(self.found(split), cropped=False))

    def found(self, split: Split) -> Subset:
        """The same part where it lies: of files, none is read for it."""
        return self._once(("found", split), lambda: self._find(split))

    def _once(self, name: object, load: Callable[[], T]) -> T:
        if name not in self._kept:
            self._kept[name] = load()
        found: T = self._kept[name]
        return found

    def _split(self) -> tuple[Subset, Subset]:
        """To train on, and held out."""
        found = self._source.read("train")
        train, held = (
            Subset(pictures=found.pictures.subset(indices), labels=found.labels[list(indices)], classes=found.classes)
            for indices in split_off(found, self._holdout, self._seed)
        )
        return train, held

    def _find(self, split: Split) -> Subset:
        if split == "test":
            found = self._source.read("test")
            return Subset(pictures=found.pictures, labels=found.labels, classes=found.classes)
        if split != "holdout":
            raise InvalidValue(f"A split is 'holdout' or 'test', found {split!r}.")
        if not self._holdout:
            raise DataError("This task holds out nothing (holdout=0), so there is nothing to score. Give it a holdout.")
        return self._once("split", self._split)[1]

    def _settled(self, subset: Subset, cropped: bool) -> Subset:
        pictures = subset.pictures.settle(self._size, cropped=cropped)
        return Subset(pictures=pictures, labels=subset.labels, classes=subset.classes)
