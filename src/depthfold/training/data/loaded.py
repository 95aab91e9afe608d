"""What a task has loaded in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from depthfold.errors import DataError, InvalidValue
from depthfold.training.data.collection import Pictures, Size, Source
from depthfold.training.data.feed import Feed
from depthfold.training.data.holdout import split_off
from depthfold.training.task import Split

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
