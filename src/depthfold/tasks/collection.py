"""The hold-out: a part of the training set, fixed for good, that importances are scored on.

Within a class the images are put in the order of a digest of their names, and the first so many are held out. So the
choice is the same on every machine and in every version, an image that is added or taken away changes at most one
other, and a dataset of fewer classes has the hold-out of those classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from depthfold.errors import DataError, InvalidValue
from depthfold.support.coerce import as_float, as_tuple, as_whole
from depthfold.support.text import count
from depthfold.training.task import mix

# A collection: the images of one part of a dataset, their labels, and what they are called.

Part = Literal["train", "test"]
Size = tuple[int, int]  # height and width
Normal = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation, by channel, of values 0..1


def as_size(value: object) -> Size:
    """What the user wants images brought to: a number, or (height, width)."""
    sides = value if isinstance(value, tuple | list) else (value, value)
    if len(sides) != 2:
        raise InvalidValue(f"size must be a number or (height, width), found {value!r}.")
    height, width = (as_whole("size", side, InvalidValue) for side in sides)
    return height, width


def as_normal(value: object) -> Normal:
    """What the user gives to normalise by."""
    try:
        mean, deviation = as_tuple("normalise", value, InvalidValue)
        means, deviations = (
            tuple(as_float(what, number, InvalidValue) for number in as_tuple(what, row, InvalidValue))
            for what, row in (("A mean of normalise", mean), ("A deviation of normalise", deviation))
        )
    except ValueError as error:  # InvalidValue is one, too many or too few to unpack is another
        raise InvalidValue(
            f"normalise must be (means, deviations), a number for every channel in each; found {value!r:.80}. For "
            "ImageNet's: ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))."
        ) from error
    if not all(map(math.isfinite, means)) or not all(0 < number < math.inf for number in deviations):
        raise InvalidValue(f"normalise must have finite means, and deviations above 0; found {value!r:.80}.")
    return means, deviations


def normalised(images: Tensor, normal: Normal) -> Tensor:
    """In float32, whatever the model computes in: the same numbers for everyone."""
    mean, deviation = normal
    if len(mean) != len(deviation) or len(mean) not in (1, images.shape[1]):
        raise InvalidValue(
            f"normalise has {len(mean)} means and {len(deviation)} deviations, and the images have "
            f"{images.shape[1]} channels. Give one of each for every channel, or for all."
        )
    scale = 255.0 if images.dtype == torch.uint8 else 1.0
    means, deviations = (torch.tensor(v, device=images.device)[:, None, None] * scale for v in normal)
    return (images.float() - means) / deviations


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """The images of one batch, by index. `crop` holds ten tries of four uniform numbers for each image where a random
    part of it is asked for (see geometry.crop_boxes), and is None where the centre is.

    NumPy, because requests travel to processes that read, and tensors would take shared memory for it.
    """

    indices: np.ndarray
    crop: np.ndarray | None = None


class Pictures(Protocol):
    """Images that can be read in batches, in memory or in files."""

    def __len__(self) -> int: ...

    def subset(self, indices: Sequence[int]) -> Pictures: ...

    def settle(self, size: Size | None, *, cropped: bool) -> Pictures:
        """The same pictures, in memory where they fit. `cropped`: random parts of them will be asked for."""
        ...

    def read(self, requests: Iterable[Request], size: Size | None, device: torch.device) -> Iterator[Tensor]:
        """A batch for every request, in their order, on the device: N x C x H x W. `size` None: as they are."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Collection:
    """Pictures with their labels. `keys` names each picture for good: the hold-out is chosen by it. `where` is for
    messages."""

    where: str
    classes: tuple[str, ...]
    labels: Tensor
    keys: Sequence[object]
    pictures: Pictures

    def __post_init__(self) -> None:
        if not len(self.labels) == len(self.keys) == len(self.pictures):
            raise DataError(
                f"{self.where} has {count(len(self.pictures), 'image')} and {count(len(self.labels), 'label')}; "
                "expected one label for each image."
            )
        if not len(self.labels):
            raise DataError(f"{self.where} has no images. Check the path, or fetch the dataset again.")
        wrong = ((self.labels < 0) | (self.labels >= len(self.classes))).nonzero()
        if len(wrong):
            first = int(wrong[0])
            raise DataError(
                f"{self.where}: the label of image {self.keys[first]!r} is {int(self.labels[first])}, expected 0 to "
                f"{len(self.classes) - 1} ({count(len(wrong), 'such label')} in all). Check that the file belongs to "
                "this dataset."
            )


class Source(Protocol):
    """Where a dataset lies. It is small, travels to other processes, and reads when it is asked."""

    @property
    def title(self) -> str:
        """Which dataset it is, wherever it lies: another training set has another title, which takes a look at it."""
        ...

    @property
    def normal(self) -> Normal:
        """What the images are normalised by if the user does not say."""
        ...

    def read(self, part: Part) -> Collection: ...


def listed(problems: Sequence[str], most: int = 10) -> str:
    """Problems one under another, and how many more there are."""
    more = [f"... and {len(problems) - most} more"] if len(problems) > most else []
    return "".join(f"\n  {problem}" for problem in [*problems[:most], *more])


def check_holdout(holdout: float | int) -> None:
    """A share of each class between 0 and 1, or a whole number of images of each class."""
    is_share = isinstance(holdout, float) and 0.0 < holdout < 1.0
    is_number = isinstance(holdout, int) and not isinstance(holdout, bool) and holdout >= 0
    if not (is_share or is_number):
        raise InvalidValue(
            f"holdout must be a share of each class between 0 and 1, such as 0.1, or a whole number of images of each "
            f"class, such as 50 (0: none), found {holdout!r}."
        )


def split_off(collection: Collection, holdout: float | int, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The indices to train on, and those held out: of every class the same share, or the same number."""
    members: list[list[int]] = [[] for _ in collection.classes]
    for index, label in enumerate(collection.labels.tolist()):
        members[label].append(index)
    kept: list[int] = []
    held: list[int] = []
    problems: list[str] = []
    for name, indices in zip(collection.classes, members, strict=True):
        number = holdout if isinstance(holdout, int) else max(1, round(holdout * len(indices)))
        if not indices:
            problems.append(f"class {name!r} has no image")
        elif number >= len(indices):
            problems.append(f"class {name!r} has {count(len(indices), 'image')}, and {number} would be held out")
        if number:
            indices = sorted(indices, key=lambda index: (mix(seed, "holdout", collection.keys[index]), index))
        held += indices[:number]
        kept += indices[number:]
    if problems:
        raise DataError(
            f"{collection.where} cannot be split with holdout={holdout}:{listed(problems)}\nEvery class needs at least "
            "one image more than is held out. Give a smaller holdout, or other classes."
        )
    return tuple(sorted(kept)), tuple(sorted(held))
