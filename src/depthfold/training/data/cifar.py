"""CIFAR-10 and CIFAR-100 in their official binary layout. Their other layout is pickled; nothing is unpickled here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from depthfold.errors import DataError
from depthfold.training.data.collection import Collection, Normal, Part, listed
from depthfold.training.data.digest import digest
from depthfold.training.data.held import Held

_SIDE = 32
_PIXELS = 3 * _SIDE * _SIDE


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cifar:
    """A file is a row of records: the label bytes, the last of which counts, and the red, green and blue planes."""

    folder: ClassVar[str]
    pickled: ClassVar[str]
    names: ClassVar[str]
    files: ClassVar[dict[Part, tuple[str, ...]]]
    label_bytes: ClassVar[int]
    class_count: ClassVar[int]
    name: ClassVar[str]
    normal: ClassVar[Normal]

    path: Path  # the folder, or the one it lies in

    @property
    def title(self) -> str:
        folder = self._complete("train")
        return f"{self.name}, {digest((folder / file).read_bytes() for file in self.files['train'])}"

    def read(self, part: Part) -> Collection:
        folder = self._complete(part)
        records = np.concatenate([self._records(folder / name) for name in self.files[part]])
        pixels = torch.from_numpy(records[:, self.label_bytes :].reshape(-1, 3, _SIDE, _SIDE).copy())
        return Collection(
            where=f"{folder} ({part})",
            classes=self._classes(folder / self.names),
            labels=torch.from_numpy(records[:, self.label_bytes - 1].astype(np.int64)),
            keys=range(len(records)),
            pictures=Held(pixels=pixels),
        )

    def _complete(self, part: Part) -> Path:
        """The folder, with all files of the part."""
        folder = self._found()
        missing = [name for name in (*self.files[part], self.names) if not (folder / name).is_file()]
        if missing:
            raise DataError(f"{folder} lacks files of its binary layout:{listed(missing)}\n{self._advice()}")
        return folder

    def _found(self) -> Path:
        every = {name for files in self.files.values() for name in files}
        for folder in (self.path, self.path / self.folder):
            if any((folder / name).is_file() for name in every):
                return folder
        found = "does not exist" if not self.path.exists() else f"has neither these files nor a folder {self.folder}"
        if any((folder / self.pickled).exists() for folder in (self.path, self.path.parent)):
            found += f" (but {self.pickled}, which is pickled, and not read)"
        raise DataError(f"Expected {', '.join(sorted(every))} in {self.path}, which {found}. {self._advice()}")

    def _advice(self) -> str:
        return (
            f"Name the folder {self.folder} or the one it lies in; fetch it, in the binary version, from "
            "https://www.cs.toronto.edu/~kriz/cifar.html"
        )

    def _records(self, file: Path) -> np.ndarray:
        length = self.label_bytes + _PIXELS
        data = np.fromfile(file, dtype=np.uint8)
        if not len(data) or len(data) % length:
            raise DataError(
                f"{file} has {len(data)} bytes, expected a multiple of {length}, the length of a record. It was cut "
                "short, or is another file; fetch it again."
            )
        return data.reshape(-1, length)

    def _classes(self, file: Path) -> tuple[str, ...]:
        names = tuple(filter(None, (line.strip() for line in file.read_text().splitlines())))
        if len(names) != self.class_count:
            raise DataError(
                f"{file} has {len(names)} class names, expected {self.class_count}, one a line. Fetch it again."
            )
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
    normal: ClassVar[Normal] = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cifar100(_Cifar):
    """50,000 training and 10,000 test images of 100 classes (the fine labels)."""

    folder: ClassVar[str] = "cifar-100-binary"
    pickled: ClassVar[str] = "cifar-100-python"
    names: ClassVar[str] = "fine_label_names.txt"
    files: ClassVar[dict[Part, tuple[str, ...]]] = {"train": ("train.bin",), "test": ("test.bin",)}
    label_bytes: ClassVar[int] = 2  # the coarse one first
    class_count: ClassVar[int] = 100
    name: ClassVar[str] = "CIFAR-100"
    normal: ClassVar[Normal] = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
