"""Datasets that fit into memory: CIFAR, Fashion-MNIST, and the user's tensors."""

from __future__ import annotations

import gzip
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from depthfold.errors import DataError, InvalidValue
from depthfold.support.digest import digest
from depthfold.support.text import one_line
from depthfold.tasks.images import MemoryImages
from depthfold.tasks.source import DatasetPart, MeanStd, Part, indented

# --- CIFAR-10 and CIFAR-100, in the binary layout. The other official layout is pickled and is not read. ---

_SIDE = 32
_PIXELS = 3 * _SIDE * _SIDE


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cifar:
    """A file is a sequence of records: label bytes, of which the last is used, then the red, green and blue planes."""

    folder: ClassVar[str]
    pickled: ClassVar[str]
    names: ClassVar[str]
    files: ClassVar[dict[Part, tuple[str, ...]]]
    label_bytes: ClassVar[int]
    class_count: ClassVar[int]
    name: ClassVar[str]
    mean_std: ClassVar[MeanStd]

    path: Path  # the folder, or its parent

    @property
    def identity(self) -> str:
        folder = self._complete("train")
        return f"{self.name}, {digest(*((folder / file).read_bytes() for file in self.files['train']))}"

    def read(self, part: Part) -> DatasetPart:
        folder = self._complete(part)
        records = np.concatenate([self._records(folder / name) for name in self.files[part]])
        pixels = torch.from_numpy(records[:, self.label_bytes :].reshape(-1, 3, _SIDE, _SIDE).copy())
        return DatasetPart(
            where=f"{folder} ({part})",
            classes=self._classes(folder / self.names),
            labels=torch.from_numpy(records[:, self.label_bytes - 1].astype(np.int64)),
            keys=range(len(records)),
            images=MemoryImages(pixels=pixels),
        )

    def _complete(self, part: Part) -> Path:
        """Return the folder. Raise DataError if it lacks a file of the part."""
        folder = self._found()
        missing = [name for name in (*self.files[part], self.names) if not (folder / name).is_file()]
        if missing:
            raise DataError(f"{folder} lacks files of the binary layout:{indented(missing)}\n{self._advice()}")
        return folder

    def _found(self) -> Path:
        every = {name for files in self.files.values() for name in files}
        for folder in (self.path, self.path / self.folder):
            if any((folder / name).is_file() for name in every):
                return folder
        problem = "does not exist" if not self.path.exists() else f"has neither these files nor a folder {self.folder}"
        if any((folder / self.pickled).exists() for folder in (self.path, self.path.parent)):
            problem += f" ({self.pickled}, the pickled version, is not read)"
        raise DataError(f"Expected {', '.join(sorted(every))} in {self.path}, which {problem}. {self._advice()}")

    def _advice(self) -> str:
        return (
            f"Give the folder {self.folder} or its parent; download the binary version from "
            "https://www.cs.toronto.edu/~kriz/cifar.html"
        )

    def _records(self, file: Path) -> np.ndarray:
        length = self.label_bytes + _PIXELS
        data = np.fromfile(file, dtype=np.uint8)
        if not len(data) or len(data) % length:
            raise DataError(
                f"{file} has {len(data)} bytes, expected a multiple of the record length {length}. Download it again."
            )
        return data.reshape(-1, length)

    def _classes(self, file: Path) -> tuple[str, ...]:
        names = tuple(filter(None, (line.strip() for line in file.read_text().splitlines())))
        if len(names) != self.class_count:
            raise DataError(f"{file} has {len(names)} class names, expected {self.class_count}. Download it again.")
        return names


@dataclass(frozen=True, slots=True, kw_only=True)
class Cifar10(_Cifar):
    """50,000 training and 10,000 test images of 10 classes."""

    folder: ClassVar[str] = "cifar-10-batches-bin"
    pickled: ClassVar[str] = "cifar-10-batches-py"
    names: ClassVar[str] = "batches.meta.txt"
    files: ClassVar[dict[Part, tuple[str, ...]]] = {
        "train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        "test": ("test_batch.bin",),
    }
    label_bytes: ClassVar[int] = 1
    class_count: ClassVar[int] = 10
    name: ClassVar[str] = "CIFAR-10"
    mean_std: ClassVar[MeanStd] = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cifar100(_Cifar):
    """50,000 training and 10,000 test images of 100 classes (the fine labels)."""

    folder: ClassVar[str] = "cifar-100-binary"
    pickled: ClassVar[str] = "cifar-100-python"
    names: ClassVar[str] = "fine_label_names.txt"
    files: ClassVar[dict[Part, tuple[str, ...]]] = {"train": ("train.bin",), "test": ("test.bin",)}
    label_bytes: ClassVar[int] = 2  # the coarse label first
    class_count: ClassVar[int] = 100
    name: ClassVar[str] = "CIFAR-100"
    mean_std: ClassVar[MeanStd] = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))


# --- Fashion-MNIST, in its IDX files, plain or compressed ---

_CLASSES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_PREFIX: dict[Part, str] = {"train": "train", "test": "t10k"}
_UBYTE = 0x08  # the dtype, in the third byte of an IDX file; the fourth is the number of dimensions


@dataclass(frozen=True, slots=True, kw_only=True)
class FashionMnist:
    """60,000 training and 10,000 test images of 10 classes: 28 x 28, one channel."""

    mean_std: ClassVar[MeanStd] = ((0.2860,), (0.3530,))

    path: Path  # the folder raw, FashionMNIST, or its parent

    @property
    def identity(self) -> str:
        # By contents, so that it does not depend on compression.
        images, labels = self._files("train")
        return f"Fashion-MNIST, {digest(_idx(images, dimensions=3).tobytes(), _idx(labels, dimensions=1).tobytes())}"

    def read(self, part: Part) -> DatasetPart:
        images, labels = self._files(part)
        pixels = _idx(images, dimensions=3)
        return DatasetPart(
            where=f"{images.parent} ({part})",
            classes=_CLASSES,
            labels=torch.from_numpy(_idx(labels, dimensions=1).astype(np.int64)),
            keys=range(len(pixels)),
            images=MemoryImages(pixels=torch.from_numpy(pixels[:, None].copy())),
        )

    def _files(self, part: Part) -> tuple[Path, Path]:
        prefix = _PREFIX[part]
        return self._found(f"{prefix}-images-idx3-ubyte"), self._found(f"{prefix}-labels-idx1-ubyte")

    def _found(self, name: str) -> Path:
        for folder in (self.path, self.path / "raw", self.path / "FashionMNIST" / "raw"):
            for file in (folder / name, folder / f"{name}.gz"):
                if file.is_file():
                    return file
        raise DataError(
            f"Expected {name} or {name}.gz in {self.path}, or in raw/ or FashionMNIST/raw/ below it, found neither. "
            "Give the folder that contains FashionMNIST/raw, or download the files from "
            "https://github.com/zalandoresearch/fashion-mnist"
        )


def _idx(file: Path, dimensions: int) -> np.ndarray:
    """Return the array in an IDX file: a magic number, the length of each dimension, and the data."""
    try:
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file} cannot be decompressed: {error}. Download it again.") from None
    expected = bytes((0, 0, _UBYTE, dimensions))
    if data[:4] != expected:
        raise DataError(
            f"{file} starts with 0x{data[:4].hex()}, expected 0x{expected.hex()}, the magic number of an IDX file of "
            f"bytes in {dimensions} dimensions. Download it again."
        )
    start = 4 + 4 * dimensions
    lengths = struct.unpack(f">{dimensions}I", data[4:start]) if len(data) >= start else ()
    size = int(np.prod(lengths, dtype=object)) if lengths else 1
    if not lengths or len(data) - start != size:
        raise DataError(
            f"{file} has {len(data)} bytes, but its header says {start + size if lengths else f'{start} or more'}. "
            "Download it again."
        )
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(lengths)


# --- Tensors ---

Pair = tuple[Tensor, Tensor]  # images and labels


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InMemory:
    """Images (N x C x H x W, uint8 or float) and labels (N integers). The test part is optional.

    uint8 images are normalised by their own mean and standard deviation; float images are not normalised.
    """

    train: Pair = field(repr=False)
    test: Pair | None = field(default=None, repr=False)
    classes: tuple[str, ...] = field(default=(), repr=False)
    mean_std: MeanStd = field(init=False)

    def __post_init__(self) -> None:
        train = _checked("train", self.train)
        test = None if self.test is None else _checked("test", self.test)
        if test is not None and (test[0].shape[1], test[0].dtype) != (train[0].shape[1], train[0].dtype):
            raise DataError(
                f"The test images have {test[0].shape[1]} channels of {test[0].dtype}, the training images "
                f"{train[0].shape[1]} of {train[0].dtype}; expected the same."
            )
        classes = self.classes or tuple(map(str, range(int(train[1].max()) + 1)))
        values = {"train": train, "test": test, "classes": classes, "mean_std": _mean_std(train[0])}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def identity(self) -> str:
        found = digest(*(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data for tensor in self.train))
        return f"{len(self.train[0])} images in memory, {found}"

    def read(self, part: Part) -> DatasetPart:
        pair = self.train if part == "train" else self.test
        if pair is None:
            raise DataError("This task has no test images. Pass test=(images, labels) to ClassificationTask.tensors.")
        return DatasetPart(
            where=f"The {part} part in memory",
            classes=self.classes,
            labels=pair[1],
            keys=range(len(pair[0])),
            images=MemoryImages(pixels=pair[0]),
        )


def _checked(part: str, pair: Pair) -> Pair:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        found = f"{len(pair)} items" if isinstance(pair, tuple | list) else type(pair).__name__
        raise InvalidValue(f"{part} must be a pair of tensors, {part}=(images, labels), found {found}.")
    images, labels = _tensor(f"{part} images", pair[0]), _tensor(f"{part} labels", pair[1])
    if images.ndim != 4 or not (images.dtype == torch.uint8 or images.is_floating_point()):
        raise DataError(
            f"The {part} images are {images.dtype} of shape {tuple(images.shape)}, expected uint8 (0 to 255) or float "
            "of shape (number, channels, height, width)."
        )
    if labels.shape != images.shape[:1] or labels.is_floating_point() or labels.is_complex() or not len(labels):
        raise DataError(
            f"The {part} labels are {labels.dtype} of shape {tuple(labels.shape)}, expected an integer for each of the "
            f"{len(images)} images, and at least one image."
        )
    return images, labels.long()


def _tensor(what: str, value: object) -> Tensor:
    try:
        return torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:  # PyTorch raises any of these
        raise InvalidValue(f"The {what} must be a tensor, found {type(value).__name__}: {one_line(error)}.") from error


def _mean_std(images: Tensor) -> MeanStd:
    if images.dtype != torch.uint8:
        return (0.0,), (1.0,)
    # From the counts of the 256 values: exact, so the same on every machine.
    values = torch.arange(256, dtype=torch.float64) / 255
    counts = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in images.unbind(1)]).double()
    shares = counts / counts.sum(dim=1, keepdim=True)
    means = shares @ values
    deviations = (shares @ values.square() - means.square()).clamp(min=0.0).sqrt()
    # A constant channel has the deviation 0, which cannot divide.
    return tuple(means.tolist()), tuple(deviation or 1.0 for deviation in deviations.tolist())
