"""Pictures in files, decoded batch by batch in processes of their own, ahead of their use."""

from __future__ import annotations

import importlib
import multiprocessing
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from depthfold.errors import DataError, MissingDependency
from depthfold.training.data.collection import Pictures, Request, Size
from depthfold.training.data.geometry import centre_box, crop_boxes
from depthfold.training.data.held import Held

_CHANNELS = 3  # whatever a file holds is converted to RGB
_AT_ONCE = 256  # images of a batch when all are read


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """`workers` processes decode (None: one per core, 8 at most; 0, and in a process that may have no children: this
    one decodes); `memory` is how many bytes of decoded pixels may be held; `share` of the centre is what is seen where
    no random part is asked for."""

    paths: tuple[str, ...]
    workers: int | None = None
    memory: int = 2 * 10**9
    share: float = 1.0

    def __len__(self) -> int:
        return len(self.paths)

    def subset(self, indices: Sequence[int]) -> Files:
        paths = tuple(self.paths[index] for index in indices)
        return Files(paths=paths, workers=self.workers, memory=self.memory, share=self.share)

    def settle(self, size: Size | None, *, cropped: bool) -> Pictures:
        """In memory, if nothing is lost by it. A random part is taken of the whole image, so images of different sizes
        stay in their files for it; of those that are only seen as their centres, the centres are held."""
        seen = None if cropped else size
        height, width = seen or _size(self.paths[0])
        if len(self) * _CHANNELS * height * width > self.memory:
            return self
        if cropped and any(_size(path) != (height, width) for path in self.paths[1:]):
            return self
        requests = (Request(indices=np.arange(i, min(i + _AT_ONCE, len(self)))) for i in range(0, len(self), _AT_ONCE))
        pixels = torch.cat(tuple(self.read(requests, seen, torch.device("cpu"))))
        return Held(pixels=pixels, share=self.share if cropped else 1.0)

    def read(self, requests: Iterable[Request], size: Size | None, device: torch.device) -> Iterator[Tensor]:
        workers = self._processes()
        loader: DataLoader[Tensor | DataError] = DataLoader(
            _Decoder(paths=self.paths, share=self.share, size=size),
            batch_size=None,  # a request is a whole batch
            sampler=requests,
            num_workers=workers,
            pin_memory=device.type == "cuda",
            # Without one of its own, the loader draws from the global generator, and dropout would depend on it.
            generator=torch.Generator(),
        )
        for images in loader:
            if isinstance(images, DataError):
                raise images
            yield images.to(device, non_blocking=True)

    def _processes(self) -> int:
        if multiprocessing.current_process().daemon:
            return 0
        if self.workers is not None:
            return self.workers
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return min(8, cores)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decoder(Dataset["Tensor | DataError"]):
    """What runs in the processes: a request in, a batch out."""

    paths: tuple[str, ...]
    share: float
    size: Size | None

    def __getitem__(self, request: Request) -> Tensor | DataError:
        # An error is handed over as a value: raised here, it would arrive wrapped in the text of a traceback.
        try:
            tries = [None] * len(request.indices) if request.crop is None else request.crop[:, None]
            pairs = zip(request.indices, tries, strict=True)
            return torch.from_numpy(np.stack(self._of_one_size([self._picture(i, tried) for i, tried in pairs])))
        except DataError as error:
            return error

    def _picture(self, index: int, tries: np.ndarray | None) -> tuple[str, np.ndarray]:
        path = self.paths[index]
        image = decoded(path)
        to = self.size or (image.height, image.width)
        if tries is None:
            box = centre_box(image.height, image.width, self.size, self.share)
        else:
            box = crop_boxes(tries, image.height, image.width)
        seen = image.resize((to[1], to[0]), _pillow().Resampling.BILINEAR, box=tuple(box[0].tolist()))
        return path, np.asarray(seen).transpose(2, 0, 1)

    def _of_one_size(self, pictures: list[tuple[str, np.ndarray]]) -> list[np.ndarray]:
        (first, expected), *rest = pictures
        for path, found in rest:
            if found.shape != expected.shape:
                raise DataError(
                    f"The images differ in size: {first} is {_words(expected.shape[1:])}, {path} is "
                    f"{_words(found.shape[1:])}. Give the task size=..., to bring them to one."
                )
        return [image for _, image in pictures]


def decoded(path: str) -> Any:
    """The image in RGB."""
    try:
        with _pillow().open(path) as image:
            return image.convert("RGB")
    except _pillow().DecompressionBombError as error:  # no kin of the others
        raise DataError(
            f"The image {path} is too large: {error} Make it smaller, or take it out of its folder."
        ) from None
    except (OSError, ValueError, SyntaxError) as error:  # Pillow's three ways to say that a file is damaged
        raise DataError(
            f"The image {path} cannot be read: {error}. Fetch it again, or take it out of its folder."
        ) from None


def _size(path: str) -> Size:
    """From the file's first bytes alone."""
    try:
        with _pillow().open(path) as image:
            return image.height, image.width
    except (OSError, ValueError, SyntaxError, _pillow().DecompressionBombError):
        image = decoded(path)  # raises, and says why
        return image.height, image.width


def _words(size: Sequence[int]) -> str:
    return f"{size[0]} x {size[1]}"


def _pillow() -> Any:
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        raise MissingDependency(
            "Pillow, which reads images, is not installed. Install it with: pip install depthfold[train]"
        ) from error
