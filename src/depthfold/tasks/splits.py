"""The splits of a dataset: the training set, the hold-out set that importances are scored on, and the test set.

In each class, the images are sorted by a digest of their keys, and the first ones are held out. So the hold-out set is
the same on every machine and in every version. Adding or removing an image changes at most one other image, and a
dataset with fewer classes has the hold-out images of those classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from depthfold.errors import DataError, InvalidValue
from depthfold.support.text import count
from depthfold.tasks.batches import BatchReader
from depthfold.tasks.source import DatasetPart, Images, Size, Source, indented
from depthfold.training import Split, derive_seed

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LabelledImages:
    """Images to train on or to score, with their labels."""

    images: Images
    labels: Tensor
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)


class LoadedSplits:
    """The splits of a source, read on first use and cached; the test set is read only to be scored.

    When it is pickled, only the identity of the data is kept, and the data is read again in the other process.
    """

    __slots__ = ("_cache", "_holdout", "_seed", "_size", "_source")

    def __init__(
        self, source: Source, size: Size | None, holdout: float | int, seed: int, identity: str | None = None
    ) -> None:
        self._source, self._size, self._holdout, self._seed = source, size, holdout, seed
        self._cache: dict[object, Any] = {} if identity is None else {"identity": identity}

    def __reduce__(self) -> tuple[type[LoadedSplits], tuple[object, ...]]:
        return LoadedSplits, (self._source, self._size, self._holdout, self._seed, self._cache.get("identity"))

    @property
    def identity(self) -> str:
        """The identity of the source."""
        return self._once("identity", lambda: self._source.identity)

    @property
    def has_holdout(self) -> bool:
        """False if nothing is held out, and the source has no hold-out set of its own."""
        return self._holdout != 0 or self._has_own_holdout

    @property
    def _has_own_holdout(self) -> bool:
        return getattr(self._source, "own_holdout", False)

    @property
    def train(self) -> LabelledImages:
        """The training set without the hold-out set."""
        return self._once("train and holdout", self._train_and_holdout)[0]

    def reader(self, *, cropped: bool) -> BatchReader:
        """Return the reader of training batches; `cropped` asks for random crops."""
        return self._once(
            ("reader", cropped), lambda: BatchReader(self.train.images.cached(self._size, cropped=cropped), self._size)
        )

    def labels_on(self, device: torch.device) -> Tensor:
        """Return the labels of the training set on the device."""
        return self._once(("labels", device), lambda: self.train.labels.to(device))

    def scored(self, split: Split) -> LabelledImages:
        """Return a split for scoring, without reading its images."""
        return self._once(split, lambda: self._find(split))

    def cached(self, split: Split) -> LabelledImages:
        """Return a split for scoring, in memory if it fits."""
        found = self.scored(split)
        return self._once(
            ("cached", split), lambda: replace(found, images=found.images.cached(self._size, cropped=False))
        )

    def _once(self, key: object, load: Callable[[], T]) -> T:
        if key not in self._cache:
            self._cache[key] = load()
        found: T = self._cache[key]
        return found

    def _train_and_holdout(self) -> tuple[LabelledImages, LabelledImages]:
        found = self._source.read("train")
        if len(found.classes) == 1:
            raise DataError(
                f"{found.where} has one class, {found.classes[0]!r}, so every network is right about all images. Give "
                "data with at least two classes; an image folder has one folder for each."
            )
        if self._has_own_holdout:
            split_holdout(found, 0, self._seed)  # raises if a class has no images
            return _labelled(found), _labelled(self._source.read("holdout"))
        train, holdout = (
            LabelledImages(
                images=found.images.subset(indices), labels=found.labels[list(indices)], classes=found.classes
            )
            for indices in split_holdout(found, self._holdout, self._seed)
        )
        return train, holdout

    def _find(self, split: Split) -> LabelledImages:
        if split == "test":
            return _labelled(self._source.read("test"))
        if split != "holdout":
            raise InvalidValue(f"A split is 'holdout' or 'test', found {split!r}.")
        if not self.has_holdout:
            raise DataError("This task has no hold-out set to score (holdout=0). Give it one, for example holdout=0.1.")
        return self._once("train and holdout", self._train_and_holdout)[1]


def _labelled(part: DatasetPart) -> LabelledImages:
    return LabelledImages(images=part.images, labels=part.labels, classes=part.classes)


def check_holdout(holdout: float | int) -> None:
    """Raise InvalidValue unless it is a share of each class, or a number of images per class."""
    is_share = isinstance(holdout, float) and 0.0 < holdout < 1.0
    is_number = isinstance(holdout, int) and not isinstance(holdout, bool) and holdout >= 0
    if not (is_share or is_number):
        raise InvalidValue(
            "holdout must be a share of each class between 0 and 1, such as 0.1, or a number of images per class, such "
            f"as 50 (0: none), found {holdout!r}."
        )


def split_holdout(part: DatasetPart, holdout: float | int, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the indices to train on, and those held out: the same share, or the same number, of each class."""
    members: list[list[int]] = [[] for _ in part.classes]
    for index, label in enumerate(part.labels.tolist()):
        members[label].append(index)
    if empty := [name for name, indices in zip(part.classes, members, strict=True) if not indices]:
        raise DataError(
            f"{part.where} has no images of {len(empty)} of its {count(len(members), 'class', 'classes')}:"
            f"{indented(empty)}\nAdd images of these classes, or renumber the labels: they count from 0 to "
            f"{len(members) - 1}."
        )
    kept: list[int] = []
    held: list[int] = []
    problems: list[str] = []
    for name, indices in zip(part.classes, members, strict=True):
        number = holdout if isinstance(holdout, int) else max(1, round(holdout * len(indices)))
        if number >= len(indices):
            problems.append(f"class {name!r} has {count(len(indices), 'image')}, but {number} would be held out")
        if number:
            indices = sorted(indices, key=lambda index: (derive_seed(seed, "holdout", part.keys[index]), index))
        held += indices[:number]
        kept += indices[number:]
    if problems:
        raise DataError(
            f"{part.where} cannot be split with holdout={holdout}:{indented(problems)}\nUse a smaller holdout or other "
            "classes: each class needs at least one image more than is held out."
        )
    return tuple(sorted(kept)), tuple(sorted(held))
