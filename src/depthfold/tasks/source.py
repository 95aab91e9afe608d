"""The interfaces of datasets: a source, its two parts, and images that are read in batches."""

from __future__ import annotations

import functools
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

Part = Literal["train", "holdout", "test"]  # only a source with `own_holdout` has "holdout"
Size = tuple[int, int]  # height and width
MeanStd = tuple[tuple[float, ...], tuple[float, ...]]  # by channel, of values from 0 to 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchRequest:
    """The images of one batch, by index.

    For random crops, `crop` has TRIES rows of four uniform numbers for each image (see images.crop_boxes); for centre
    crops it is None. Both are NumPy arrays, because tensors would take shared memory on their way to other processes.
    `seed` is that of the random transforms in the user's own dataset.
    """

    indices: np.ndarray
    crop: np.ndarray | None = None
    seed: int = 0


class Images(Protocol):
    """Images in memory or in files, read in batches."""

    def __len__(self) -> int: ...

    def subset(self, indices: Sequence[int]) -> Images: ...

    def cached(self, size: Size | None, *, cropped: bool) -> Images:
        """Return the same images, in memory if they fit. `cropped` says that random crops will be requested."""
        ...

    def read(self, requests: Iterable[BatchRequest], size: Size | None, device: torch.device) -> Iterator[Tensor]:
        """Yield a batch (N x C x H x W) on the device for each request, resized unless `size` is None."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DatasetPart:
    """The images of one part of a dataset, with labels.

    `keys` identify the images permanently: the hold-out set is selected by them. `where` is used in messages.
    """

    where: str
    classes: tuple[str, ...]
    labels: Tensor
    keys: Sequence[object]
    images: Images

    def __post_init__(self) -> None:
        if not len(self.labels) == len(self.keys) == len(self.images):
            raise DataError(
                f"{self.where} has {count(len(self.images), 'image')} and {count(len(self.labels), 'label')}, "
                "expected one label for each image."
            )
        if not len(self.labels):
            raise DataError(f"{self.where} has no images. Check the path, or download the dataset again.")
        wrong = ((self.labels < 0) | (self.labels >= len(self.classes))).nonzero()
        if len(wrong):
            first = int(wrong[0])
            raise DataError(
                f"{self.where}: the label of image {self.keys[first]!r} is {int(self.labels[first])}, expected 0 to "
                f"{len(self.classes) - 1} ({count(len(wrong), 'such label')} in total). Check that these are "
                "the labels of this dataset."
            )


class Source(Protocol):
    """A dataset on disk or in memory. It is small, can be sent to other processes, and reads on demand."""

    @property
    def identity(self) -> str:
        """Text that identifies the training set by its contents, not by its path. It may read the data."""
        ...

    @property
    def mean_std(self) -> MeanStd:
        """The default mean and standard deviation for normalising."""
        ...

    def read(self, part: Part) -> DatasetPart: ...


def as_size(value: object) -> Size:
    """Convert a number or (height, width) to a size."""
    sides = value if isinstance(value, tuple | list) else (value, value)
    if len(sides) != 2:
        raise InvalidValue(f"size must be a number or (height, width), found {value!r}.")
    height, width = (as_whole("size", side, InvalidValue) for side in sides)
    return height, width


def as_mean_std(value: object) -> MeanStd:
    """Convert the user's value of `normalise`."""
    try:
        mean, std = as_tuple("normalise", value, InvalidValue)
        means, stds = (
            tuple(as_float(what, number, InvalidValue) for number in as_tuple(what, row, InvalidValue))
            for what, row in (("A mean of normalise", mean), ("A deviation of normalise", std))
        )
    except ValueError as error:  # InvalidValue is a ValueError; unpacking raises another
        raise InvalidValue(
            f"normalise must be (means, deviations) with a number for each channel, found {value!r:.80}. For ImageNet: "
            "((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))."
        ) from error
    if not all(map(math.isfinite, means)) or not all(0 < number < math.inf for number in stds):
        raise InvalidValue(f"normalise must have finite means and deviations above 0, found {value!r:.80}.")
    return means, stds


def normalise_images(images: Tensor, mean_std: MeanStd) -> Tensor:
    """Return the images normalised, in float32 regardless of the model's precision."""
    mean, std = mean_std
    if len(mean) != len(std) or len(mean) not in (1, images.shape[1]):
        raise InvalidValue(
            f"normalise has {len(mean)} means and {len(std)} deviations, but the images have {images.shape[1]} "
            "channels. Give one of each per channel, or one for all."
        )
    means, stds = _mean_std_on(images.device, mean_std, 255.0 if images.dtype == torch.uint8 else 1.0)
    return (images.float() - means) / stds


@functools.lru_cache(maxsize=16)  # copying them to the device in every step would wait for it
def _mean_std_on(device: torch.device, mean_std: MeanStd, scale: float) -> tuple[Tensor, Tensor]:
    means, stds = (
        torch.tensor(values, dtype=torch.float32, device=device)[:, None, None] * scale for values in mean_std
    )
    return means, stds


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Return the array as a tensor on the device, without waiting for the device to finish its earlier work."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)  # PyTorch keeps pinned memory until it has been copied


def indented(lines: Sequence[str], limit: int = 10) -> str:
    """Return the lines, each indented on a new line, and the number of those over the limit."""
    more = [f"... and {len(lines) - limit} more"] if len(lines) > limit else []
    return "".join(f"\n  {line}" for line in [*lines[:limit], *more])
