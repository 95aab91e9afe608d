"""A folder of image files: train/ and val/, and in each a folder for every class."""

from __future__ import annotations

import importlib
import multiprocessing
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from depthfold.errors import DataError, InvalidValue, MissingDependency
from depthfold.support.coerce import as_tuple_of
from depthfold.support.digest import digest
from depthfold.support.text import count, did_you_mean
from depthfold.tasks.collection import Collection, Normal, Part, Pictures, Request, Size, listed
from depthfold.tasks.pictures import Held, centre_box, crop_boxes

# Pictures in files, decoded batch by batch in processes of their own, ahead of their use.

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


_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFolder:
    """`classes` are the folders that count, and a label is a place in this list; None: all of train/, by name.

    `train` and `test` are the names of the two folders. Files that do not end like an image's are left alone.
    `share`, `workers` and `memory` are those of Files.
    """

    normal: ClassVar[Normal] = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # ImageNet's

    path: Path
    classes: tuple[str, ...] | None = None
    train: str = "train"
    test: str = "val"
    share: float = 0.875
    workers: int | None = None
    memory: int = 2 * 10**9

    @property
    def title(self) -> str:
        folder = self._folder("train")
        classes = self._classes(folder)
        listing = [f"{name}/{file} {size}\n" for name in classes for file, size in _sizes(folder / name)]
        found = digest(*map(os.fsencode, listing), *(_first(folder / name) for name in classes))
        parts = f"{len(listing)} images in {len(classes)} classes"
        return f"image folder of {parts}, {found} ({self.train}, {self.test}; share {self.share})"

    def read(self, part: Part) -> Collection:
        folder = self._folder(part)
        classes = self._classes(folder)
        files = [_images(folder / name) for name in classes]
        problems = [f"{folder / name}" for name, found in zip(classes, files, strict=True) if not found]
        if problems:
            raise DataError(
                f"{count(len(problems), 'class folder')} without an image ({', '.join(_SUFFIXES)}):{listed(problems)}\n"
                "Fetch the images again, or name the classes that you want by classes=..."
            )
        named = [(name, label, file) for label, name in enumerate(classes) for file in files[label]]
        return Collection(
            where=f"{folder}",
            classes=classes,
            labels=torch.tensor([label for _, label, _ in named]),
            keys=[f"{name}/{file}" for name, _, file in named],
            pictures=Files(
                paths=tuple(os.path.join(folder, name, file) for name, _, file in named),  # noqa: PTH118  # a million
                workers=self.workers,
                memory=self.memory,
                share=self.share,
            ),
        )

    def _folder(self, part: Part) -> Path:
        name = self.train if part == "train" else self.test
        if not (self.path / name).is_dir():
            there = ", ".join(_folders(self.path)) or "none" if self.path.is_dir() else f"no folder {self.path}"
            raise DataError(
                f"Expected a folder {name} in {self.path}, found {there}. Name the folder that holds {self.train}/ and "
                f"{self.test}/, or give train=... and test=..., the names that they have."
            )
        return self.path / name

    def _classes(self, folder: Path) -> tuple[str, ...]:
        """The classes, all of which the folder has."""
        found = _folders(folder)
        if self.classes is not None:
            missing = [_missing(name, found) for name in self.classes if name not in set(found)]
            if missing:
                raise DataError(
                    f"{folder} lacks {len(missing)} of the {len(self.classes)} classes:{listed(missing)}\nA class is "
                    "named as its folder is."
                )
            return self.classes
        classes = _folders(self._folder("train"))
        if classes != found:
            only_here, only_there = sorted({*found} - {*classes}), sorted({*classes} - {*found})
            raise DataError(
                f"{self.train}/ and {self.test}/ of {self.path} have different classes:"
                + listed([f"only in {self.test}/: {name}" for name in only_here])
                + listed([f"only in {self.train}/: {name}" for name in only_there])
                + "\nFetch what is missing, or name the classes that you want by classes=..."
            )
        if not classes:
            raise DataError(f"{folder} has no folders, expected one for every class, with its images in it.")
        return classes


def class_list(classes: str | os.PathLike[str] | Iterable[str]) -> tuple[str, ...]:
    """Class names as they are, or out of a file that has one a line."""
    if isinstance(classes, str | os.PathLike):
        file = Path(classes)
        if not file.is_file():
            raise DataError(f"classes={str(file)!r} is no file, expected one with the name of a class in each line.")
        classes = filter(None, (line.strip() for line in file.read_text().splitlines()))
        where = f"The list of classes {file}"
    else:
        where = "The list of classes"
    names = as_tuple_of(str, "classes", classes, InvalidValue)
    twice = sorted({name for name in names if names.count(name) > 1})
    if not names or twice:
        found = f"has {', '.join(map(repr, twice))} more than once" if twice else "is empty"
        raise DataError(f"{where} {found}, expected every class once.")
    return names


def _folders(path: Path) -> tuple[str, ...]:
    with os.scandir(path) as entries:
        return tuple(sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")))


def _images(folder: Path) -> list[str]:
    """Sorted, because a file system has no order, and the hidden ones left out, which other systems leave behind."""
    with os.scandir(folder) as entries:
        names = (entry.name for entry in entries)
        return sorted(name for name in names if name.lower().endswith(_SUFFIXES) and not name.startswith("."))


def _sizes(folder: Path) -> list[tuple[str, int]]:
    """The images with their sizes: what tells one dataset from another without reading a million files."""
    with os.scandir(folder) as entries:
        sizes = {entry.name: entry.stat().st_size for entry in entries}
    return [(name, sizes[name]) for name in _images(folder)]


def _first(folder: Path) -> bytes:
    """One image of a class, as files that are not compressed all have the same size."""
    try:
        return b"".join((folder / name).read_bytes() for name in _images(folder)[:1])
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}. Check its permissions.") from error


def _missing(name: str, found: Sequence[str]) -> str:
    hint = did_you_mean(name, found, str).rstrip()
    return f"{name} ({hint[0].lower()}{hint[1:]})" if hint else name
