"""A dataset of image files: the folders train/ and val/, each with a folder per class."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from depthfold.errors import DataError, InvalidValue
from depthfold.progress import Progress
from depthfold.support.coerce import as_text, as_tuple
from depthfold.support.digest import digest
from depthfold.support.machine import usable_cores
from depthfold.support.optional import load
from depthfold.support.text import count, did_you_mean, one_line
from depthfold.tasks.images import MemoryImages, centre_box, crop_boxes
from depthfold.tasks.source import BatchRequest, DatasetPart, Images, MeanStd, Part, Size, indented

_CHANNELS = 3  # all images are converted to RGB
_CHECKED = 4096  # images that are given to the threads of a check at a time
_CACHE_BATCH = 256  # images per batch when all of them are read into memory
_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileImages:
    """Images in files, decoded by worker processes ahead of their use.

    `workers` is the number of processes (None: one per core, at most 8). With 0, or in a daemon process, which must not
    have children, this process decodes. `memory` limits the bytes of decoded images that are kept of one set, in each
    process that reads it. `crop_ratio` applies to centre crops to a size.
    """

    paths: tuple[str, ...]
    workers: int | None = None
    memory: int = 2 * 10**9
    crop_ratio: float = 1.0

    def __len__(self) -> int:
        return len(self.paths)

    def subset(self, indices: Sequence[int]) -> FileImages:
        paths = tuple(self.paths[index] for index in indices)
        return FileImages(paths=paths, workers=self.workers, memory=self.memory, crop_ratio=self.crop_ratio)

    def cached(self, size: Size | None, *, cropped: bool) -> Images:
        """Return the images in memory if they fit, otherwise in files.

        Random crops need whole images, which must then have equal sizes; otherwise only the centre crops are kept.
        """
        kept = None if cropped else size
        height, width = kept or _size(self.paths[0])
        if len(self) * _CHANNELS * height * width > self.memory:
            return self
        if cropped and any(_size(path) != (height, width) for path in self.paths[1:]):
            return self
        starts = range(0, len(self), _CACHE_BATCH)
        requests = (BatchRequest(indices=np.arange(i, min(i + _CACHE_BATCH, len(self)))) for i in starts)
        pixels = torch.cat(tuple(self.read(requests, kept, torch.device("cpu"))))
        return MemoryImages(pixels=pixels, crop_ratio=self.crop_ratio if cropped else 1.0)

    def read(self, requests: Iterable[BatchRequest], size: Size | None, device: torch.device) -> Iterator[Tensor]:
        workers = self._processes()
        loader: DataLoader[Tensor | DataError] = DataLoader(
            _Decoder(paths=self.paths, crop_ratio=self.crop_ratio, size=size),
            batch_size=None,  # a request is a whole batch
            sampler=requests,
            num_workers=workers,
            pin_memory=device.type == "cuda",
            # Otherwise the loader draws from the global generator, and dropout would depend on it.
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
        return min(8, usable_cores())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decoder(Dataset["Tensor | DataError"]):
    """The dataset of the worker processes: maps a request to a batch."""

    paths: tuple[str, ...]
    crop_ratio: float
    size: Size | None

    def __getitem__(self, request: BatchRequest) -> Tensor | DataError:
        # The error is returned: if raised, the loader would wrap it in the text of a traceback.
        try:
            crops = [None] * len(request.indices) if request.crop is None else request.crop[:, None]
            images = [self._image(index, crop) for index, crop in zip(request.indices, crops, strict=True)]
            return torch.from_numpy(np.stack(self._require_equal_sizes(images)))
        except DataError as error:
            return error

    def _image(self, index: int, crop: np.ndarray | None) -> tuple[str, np.ndarray]:
        path = self.paths[index]
        image = decode(path)
        to = self.size or (image.height, image.width)
        if crop is None:
            box = centre_box(image.height, image.width, self.size, self.crop_ratio)
        else:
            box = crop_boxes(crop, image.height, image.width)
        resized = image.resize((to[1], to[0]), _pillow().Resampling.BILINEAR, box=tuple(box[0].tolist()))
        return path, np.asarray(resized).transpose(2, 0, 1)

    def _require_equal_sizes(self, images: list[tuple[str, np.ndarray]]) -> list[np.ndarray]:
        (first, expected), *rest = images
        for path, found in rest:
            if found.shape != expected.shape:
                raise _differ(first, expected.shape[1:], path, found.shape[1:])
        return [image for _, image in images]


def decode(path: str) -> Any:
    """Return the image in RGB."""
    try:
        with _pillow().open(path) as image:
            mode = image.mode
            if not _is_clipped(mode):
                return image.convert("RGB")
    except _pillow().DecompressionBombError as error:  # not an OSError
        raise DataError(f"The image {path} is too large: {error} Resize it, or remove it from its folder.") from None
    except (OSError, ValueError, SyntaxError) as error:  # Pillow raises any of these for a damaged file
        raise DataError(
            f"The image {path} cannot be read: {error}. Download it again, or remove it from its folder."
        ) from None
    raise _clipped(path, mode)


def _is_clipped(mode: str) -> bool:
    """Return True for the modes I, I;16, I;16B and F, whose values convert() clips to 0..255."""
    return mode.startswith(("I", "F"))


def _clipped(path: str, mode: str) -> DataError:
    return DataError(
        f"The image {path} has more than 8 bits per channel (Pillow's mode {mode}), which reading would clip. Convert "
        "it to 8 bits, or scale it in a dataset of your own (ClassificationTask.from_loaders)."
    )


def check_files(paths: Sequence[str], progress: Progress, *, like: str | None = None) -> None:
    """Raise DataError with the first images that cannot be decoded, or with one that has too many bits or another size.

    The size is that of `like`. Threads decode them in the lowest resolution.
    """
    tick, bad = progress("checking images", len(paths), 0), []
    first = None if like is None else (like, _size(like))
    with ThreadPoolExecutor(usable_cores()) as pool:
        for start in range(0, len(paths), _CHECKED):
            part = paths[start : start + _CHECKED]
            for path, found in zip(part, pool.map(_check, part), strict=True):
                if isinstance(found, str):
                    bad.append(f"{path}: {found}")
                elif first is not None and found != first[1]:
                    raise _differ(*first, path, found)
                tick()
    if bad:
        raise DataError(
            f"{count(len(bad), 'image')} of {len(paths)} cannot be read:{indented(bad)}\nDownload them again, or "
            "remove them from their folders."
        )


def _check(path: str) -> Size | str:
    """Return the size of an image, or the reason if it cannot be decoded. Raise DataError if it would be clipped."""
    try:
        with _pillow().open(path) as image:
            size, mode = (image.height, image.width), image.mode  # draft() changes them
            image.draft("RGB", (1, 1))  # a JPEG is still read to its end, but decoded at an eighth of its size
            image.load()
    except (OSError, ValueError, SyntaxError, _pillow().DecompressionBombError) as error:
        return one_line(error)
    if _is_clipped(mode):
        raise _clipped(path, mode)
    return size


def digest_of_files(paths: Iterable[str]) -> str:
    """Return a digest of the names, sizes and times of change of some files."""
    stats = ((path, os.stat(path)) for path in paths)  # noqa: PTH116  # a Path for each of a million files is slow
    with _as_data_error():
        return digest(*(os.fsencode(f"{path} {found.st_size} {found.st_mtime_ns}\n") for path, found in stats))


def _size(path: str) -> Size:
    """Return the size, from the header of the file only."""
    try:
        with _pillow().open(path) as image:
            return image.height, image.width
    except (OSError, ValueError, SyntaxError, _pillow().DecompressionBombError):
        image = decode(path)  # raises DataError
        return image.height, image.width


def _differ(first: str, expected: Sequence[int], path: str, found: Sequence[int]) -> DataError:
    return DataError(
        f"The images differ in size: {first} is {expected[0]} x {expected[1]}, {path} is {found[0]} x {found[1]}. Give "
        "the size: size=... of the task in Python, --input 3x224x224 on the command line."
    )


def _pillow() -> Any:
    return load("PIL.Image", "train")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFolder:
    """A folder with the folders `train` and `test`, which have a folder per class.

    `classes` selects class folders, and a label is an index into it; None: all folders of `train`, sorted by name.
    Images in subfolders of a class folder belong to the class. Hidden files and folders, and files without the suffix
    of an image, are ignored. `crop_ratio`, `workers` and `memory` are those of FileImages.
    """

    mean_std: ClassVar[MeanStd] = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # of ImageNet

    path: Path
    classes: tuple[str, ...] | None = None
    train: str = "train"
    test: str = "val"
    crop_ratio: float = 0.875
    workers: int | None = None
    memory: int = 2 * 10**9

    def __post_init__(self) -> None:
        if not 0 < self.crop_ratio <= 1:
            raise DataError(
                f"crop_ratio is the part of an image that is scored, above 0 and at most 1; found {self.crop_ratio!r}. "
                "Use 0.875 for 224 of 256 pixels."
            )

    @property
    def identity(self) -> str:
        folder = self._folder("train")
        classes = self._classes(folder)
        listing = [f"{name}/{file} {size}\n" for name in classes for file, size in _sizes(folder / name)]
        found = digest(*map(os.fsencode, listing), *(_first(folder / name) for name in classes))
        parts = f"{len(listing)} images in {len(classes)} classes"
        return f"image folder of {parts}, {found} ({self.train}, {self.test}; crop ratio {self.crop_ratio})"

    def read(self, part: Part) -> DatasetPart:
        folder = self._folder(part)
        classes = self._classes(folder)
        files = [_images(folder / name) for name in classes]
        empty = [f"{folder / name}" for name, found in zip(classes, files, strict=True) if not found]
        if empty:
            raise DataError(
                f"{count(len(empty), 'class folder')} without an image ({', '.join(_SUFFIXES)}):{indented(empty)}\n"
                "Download the images again, or select classes with classes=..."
            )
        named = [(name, label, file) for label, name in enumerate(classes) for file in files[label]]
        return DatasetPart(
            where=f"{folder}",
            classes=classes,
            labels=torch.tensor([label for _, label, _ in named]),
            keys=[f"{name}/{file}" for name, _, file in named],
            images=FileImages(
                paths=tuple(os.path.join(folder, name, file) for name, _, file in named),  # noqa: PTH118
                workers=self.workers,
                memory=self.memory,
                crop_ratio=self.crop_ratio,
            ),
        )

    def _folder(self, part: Part) -> Path:
        name = self.train if part == "train" else self.test
        if not (self.path / name).is_dir():
            there = ", ".join(_folders(self.path)) or "none" if self.path.is_dir() else f"no folder {self.path}"
            raise DataError(
                f"Expected a folder {name} in {self.path}, found {there}. Give the folder that contains {self.train}/ "
                f"and {self.test}/, rename its folders, or give their names: train=... and test=... of the task "
                "in Python."
            )
        return self.path / name

    def _classes(self, folder: Path) -> tuple[str, ...]:
        """Return the classes. Raise DataError if the folder lacks one."""
        found = _folders(folder)
        if self.classes is not None:
            missing = [_missing(name, found) for name in self.classes if name not in set(found)]
            if missing:
                raise DataError(
                    f"{folder} lacks {len(missing)} of the {len(self.classes)} classes:{indented(missing)}\nThe name "
                    "of a class must be the name of its folder."
                )
            return self.classes
        classes = _folders(self._folder("train"))
        if classes != found:
            only_here, only_there = sorted({*found} - {*classes}), sorted({*classes} - {*found})
            raise DataError(
                f"{self.train}/ and {self.test}/ of {self.path} have different classes:"
                + indented([f"only in {self.test}/: {name}" for name in only_here])
                + indented([f"only in {self.train}/: {name}" for name in only_there])
                + "\nDownload the missing classes, or select classes with classes=..."
            )
        if not classes:
            raise DataError(f"{folder} has no folders, expected one with images for each class.")
        return classes


def class_list(classes: str | os.PathLike[str] | Iterable[str]) -> tuple[str, ...]:
    """Return the class names, which may be in a file with one name per line."""
    if isinstance(classes, str | os.PathLike):
        file = Path(classes)
        if not file.is_file():
            raise DataError(f"classes={str(file)!r} is not a file, expected one with a class name per line.")
        classes = filter(None, (line.strip() for line in file.read_text().splitlines()))
        where = f"The list of classes {file}"
    else:
        where = "The list of classes"
    names = tuple(as_text("A class name", name, InvalidValue) for name in as_tuple("classes", classes, InvalidValue))
    twice = sorted({name for name in names if names.count(name) > 1})
    if not names or twice:
        found = f"has {', '.join(map(repr, twice))} more than once" if twice else "is empty"
        raise DataError(f"{where} {found}, expected each class once.")
    return names


def _folders(path: Path) -> tuple[str, ...]:
    with os.scandir(path) as entries:
        return tuple(sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")))


def _images(folder: Path) -> list[str]:
    """Return the paths of the images in a folder and its subfolders, sorted, without hidden files and folders."""
    return sorted(_walk(f"{folder}", ""))


def _walk(folder: str, prefix: str) -> Iterator[str]:
    # os.walk() would leave out folders that cannot be read, and not notice a link to a folder that contains it.
    with _as_data_error(), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.name.lower().endswith(_SUFFIXES):
                yield f"{prefix}{entry.name}"
            elif entry.is_dir():
                yield from _walk(entry.path, f"{prefix}{entry.name}/")


def _sizes(folder: Path) -> list[tuple[str, int]]:
    """Return the names and sizes of the images, which identify a dataset without reading all files."""
    with _as_data_error():  # a Path for each of a million files is slow
        return [(name, os.stat(f"{folder}/{name}").st_size) for name in _images(folder)]  # noqa: PTH116


def _first(folder: Path) -> bytes:
    """Return the contents of one image, because uncompressed images all have the same size."""
    with _as_data_error():
        return b"".join((folder / name).read_bytes() for name in _images(folder)[:1])


@contextlib.contextmanager
def _as_data_error() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{error.filename} cannot be read: {error.strerror}. Check its permissions and links, or remove it."
        ) from error


def _missing(name: str, found: Sequence[str]) -> str:
    hint = did_you_mean(name, found, str).rstrip()
    return f"{name} ({hint[0].lower()}{hint[1:]})" if hint else name
