"""A dataset behind the user's DataLoaders.

A loader is not iterated: its items are fetched from its dataset, by the batches that a step asks for, and put together
by its collate function. Random transforms draw from the global generators, which are seeded for every item. So a batch
depends only on the seed and the step, as resuming and other workers need it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from depthfold.errors import DataError, InvalidValue
from depthfold.support.coerce import as_text, as_tuple
from depthfold.support.digest import digest
from depthfold.support.text import one_line
from depthfold.tasks.images import MemoryImages, centre_box, crop_boxes, resample
from depthfold.tasks.source import BatchRequest, DatasetPart, Images, MeanStd, Part, Size
from depthfold.training import derive_seed


class UnusedOption(UserWarning):
    """An option of a loader has no effect."""


_READ_BATCH = 256  # items per batch when all of them are read
_MEMORY = 2 * 10**9  # bytes of images to score that are kept in memory
_OR_FUNCTIONS = "or write a task of two functions (depthfold.training.FunctionTask)"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoaderImages:
    """The images of a loader, by their indices in its dataset. Those to score are `fixed`, and kept in memory."""

    where: str
    dataset: Any
    collate: Callable[[list[Any]], Any]
    indices: np.ndarray
    workers: int
    start_method: str | None  # of the workers; None: the default
    fixed: bool

    def __len__(self) -> int:
        return len(self.indices)

    def subset(self, indices: Sequence[int]) -> LoaderImages:
        return replace(self, indices=self.indices[np.asarray(indices, dtype=np.int64)])

    def cached(self, size: Size | None, *, cropped: bool) -> Images:
        """Return the images in memory if they are fixed and fit. Others may have random transforms."""
        if not self.fixed:
            return self
        (first,) = self.read([BatchRequest(indices=np.arange(1))], size, torch.device("cpu"))
        if first.nbytes * len(self) > _MEMORY:
            return self
        return MemoryImages(pixels=torch.cat(tuple(self.read(self.all_requests(), size, torch.device("cpu")))))

    def all_requests(self) -> Iterator[BatchRequest]:
        for start in range(0, len(self), _READ_BATCH):
            yield BatchRequest(indices=np.arange(start, min(start + _READ_BATCH, len(self))))

    def repeatable(self) -> bool:
        """Return False if the first items change when they are read again, by a generator of the dataset's own."""
        first = next(self.all_requests())
        # Several workers would each have a copy of the generator, in the same state.
        images = replace(self, workers=min(self.workers, 1))
        one, two = (_pixels(batch) for batch, _ in images.fetch([first, first]))
        return one == two

    def read(self, requests: Iterable[BatchRequest], size: Size | None, device: torch.device) -> Iterator[Tensor]:
        for images, _ in self.fetch(requests, size):
            yield images.to(device, non_blocking=True)

    def fetch(self, requests: Iterable[BatchRequest], size: Size | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images and labels for each request."""
        workers = 0 if multiprocessing.current_process().daemon else self.workers  # a daemon must not have children
        loader: DataLoader[Any] = DataLoader(
            _Fetcher(images=self, size=size),
            batch_size=None,  # a request is a whole batch
            sampler=requests,
            num_workers=workers,
            multiprocessing_context=self.start_method if workers else None,
            generator=torch.Generator(),  # otherwise the loader draws from the global generator
        )
        for found in loader:
            if isinstance(found, DataError):
                raise found
            yield found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fetcher(Dataset[Any]):
    """The dataset of the worker processes: maps a request to images and labels."""

    images: LoaderImages
    size: Size | None

    def __getitem__(self, request: BatchRequest) -> Any:
        where, indices = self.images.where, self.images.indices[request.indices]
        index: Any = None
        try:
            items = []
            for index in indices.tolist():
                with _seeded(derive_seed(request.seed, "item", index)):
                    items.append(self.images.dataset[index])
            index = None
            with _seeded(derive_seed(request.seed, "collate")):
                images, labels = require_batch(where, self.images.collate(items), len(indices))
        except DataError as error:
            return error  # if raised, the loader would wrap it in the text of a traceback
        except Exception as error:  # noqa: BLE001 - the user's dataset may raise anything
            what = "A batch" if index is None else f"Item {index}"
            return DataError(
                f"{what} of the {where} loader cannot be read: {type(error).__name__}: {one_line(error)}. Repair or "
                "remove it."
            )
        height, width = images.shape[-2:]
        boxes = centre_box(height, width, self.size, 1.0)
        if request.crop is not None:
            boxes = crop_boxes(request.crop, height, width)
        return resample(images, boxes, self.size), labels


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the global generators that transforms draw from, and restore them afterwards."""
    torch_state, numpy_state, state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which also seeds those of the GPUs
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(state)


def require_batch(where: str, batch: Any, number: int) -> tuple[Tensor, Tensor]:
    """Return images and labels of a batch. Raise DataError if it is something else."""
    if isinstance(batch, tuple | list) and len(batch) == 2 and all(isinstance(part, Tensor) for part in batch):
        images, labels = batch
        valid = images.ndim == 4 and (images.dtype == torch.uint8 or images.is_floating_point())
        whole = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
        if valid and whole and len(images) == number and labels.shape == (number,):
            return images, labels.long()
    raise DataError(
        f"The {where} loader yields {_describe(batch)}, expected (images, labels): images of uint8 or float (number x "
        "channels x height x width), and an integer for each. Change its dataset or collate_fn, or use a FunctionTask."
    )


def _describe(batch: Any) -> str:
    if isinstance(batch, Tensor):
        return f"a tensor of {str(batch.dtype).removeprefix('torch.')} of the shape {tuple(batch.shape)}"
    if isinstance(batch, Mapping):
        return f"a {type(batch).__name__} with the keys {', '.join(map(str, batch))}"
    if isinstance(batch, tuple | list):
        return f"({', '.join(map(_describe, batch))})"
    return type(batch).__name__


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loaders:
    """The datasets of a training, a hold-out and, optionally, a test loader.

    All items are read once for their labels, which are then kept and pickled with the task. The first ones are read
    again, to see whether they are repeatable.
    """

    mean_std: ClassVar[MeanStd] = ((0.0,), (1.0,))  # uint8 images are only scaled to 0..1
    own_holdout: ClassVar[bool] = True

    parts: Mapping[Part, LoaderImages] = field(repr=False)
    classes: tuple[str, ...] | None = None
    _read: dict[Part, tuple[Tensor, str]] = field(default_factory=dict, init=False, repr=False)

    @property
    def identity(self) -> str:
        found = digest(*(self._labels(part)[1] for part in ("train", "holdout")))
        return f"{len(self.parts['train'])} images of a loader, {found}"

    def read(self, part: Part) -> DatasetPart:
        if part not in self.parts:
            raise DataError("This task has no test loader. Pass test=... to ClassificationTask.from_loaders.")
        images = self.parts[part]
        classes = self.classes or tuple(map(str, range(int(self._labels("train")[0].max()) + 1)))
        return DatasetPart(
            where=f"The {part} loader", classes=classes, labels=self._labels(part)[0], keys=range(len(images)),
            images=images,
        )  # fmt: skip

    def _labels(self, part: Part) -> tuple[Tensor, str]:
        """Return all labels of a part, and a digest of them and, if they are repeatable, of the first images."""
        if part not in self._read:
            images = self.parts[part]
            if not len(images):
                raise DataError(f"The {part} loader has no items. Check its dataset and its sampler.")
            labels, first = [], b""
            for batch, found in images.fetch(images.all_requests()):
                first = first or _pixels(batch)
                labels.append(found)
            if not images.repeatable():
                if images.fixed:
                    raise DataError(
                        f"The items of the {part} loader change when they are read again, so scores would not repeat. "
                        "Leave out random transforms that draw from a generator of their own."
                    )
                first = b""  # otherwise no run could be resumed
            together = torch.cat(labels)
            self._read[part] = together, digest(first, together.numpy().tobytes())
        return self._read[part]


def _pixels(batch: Tensor) -> bytes:
    return batch.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def loaders(*, train: object, holdout: object, test: object | None, classes: Iterable[str] | None) -> Loaders:
    """Return the source of three loaders. Raise InvalidValue for a loader whose batches cannot be read again."""
    given: dict[Part, object] = {"train": train, "holdout": holdout}
    if test is not None:
        given["test"] = test
    parts = dict(zip(given, map(_images, given, given.values()), strict=True))
    names = getattr(parts["train"].dataset, "classes", None) if classes is None else classes
    if names is None or (classes is None and not all(isinstance(name, str) for name in names)):
        return Loaders(parts=parts)
    return Loaders(
        parts=parts,
        classes=tuple(as_text("A class", name, InvalidValue) for name in as_tuple("classes", names, InvalidValue)),
    )


def _images(part: Part, loader: object) -> LoaderImages:
    if not isinstance(loader, DataLoader):
        raise InvalidValue(
            f"{part} must be a torch.utils.data.DataLoader, found {type(loader).__name__}. For images in memory, use "
            "ClassificationTask.tensors."
        )
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__getitem__"):
        raise InvalidValue(
            f"The {part} loader streams its data, so the batch of a step cannot be read again after an interruption. "
            f"Use a dataset with indices, {_OR_FUNCTIONS}."
        )
    if loader.batch_sampler is None or type(loader.batch_sampler) is not BatchSampler:
        found = "no batches" if loader.batch_sampler is None else type(loader.batch_sampler).__name__
        raise InvalidValue(
            f"The {part} loader makes its batches itself ({found}), but their size is that of the recipe. Use "
            f"batch_size=..., {_OR_FUNCTIONS}."
        )
    if loader.worker_init_fn is not None and loader.num_workers:
        warnings.warn(  # not an error: most of these functions seed, which is done here for every item
            f"The worker_init_fn of the {part} loader is not called. If it opens files, open them on first use in the "
            "dataset's __getitem__.",
            UnusedOption,
            stacklevel=4,
        )
    context = loader.multiprocessing_context  # cannot be pickled with the task
    return LoaderImages(
        where=part, dataset=loader.dataset, collate=loader.collate_fn, indices=_indices(part, loader),
        workers=loader.num_workers, start_method=context and context.get_start_method(), fixed=part != "train",
    )  # fmt: skip


def _indices(part: Part, loader: DataLoader[Any]) -> np.ndarray:
    """Return the items that the loader draws, in a fixed order: the order of training depends on seed and epoch."""
    sampler = loader.sampler
    if type(sampler) is SubsetRandomSampler:
        return np.sort(np.asarray(list(sampler.indices), dtype=np.int64))
    whole = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    )
    if not whole:
        raise InvalidValue(
            f"The {part} loader draws its items with {type(sampler).__name__}, which depthfold cannot repeat: each "
            f"epoch takes every item once, in an order of its own. Leave out the sampler, {_OR_FUNCTIONS}."
        )
    return np.arange(len(loader.dataset))  # type: ignore[arg-type]
