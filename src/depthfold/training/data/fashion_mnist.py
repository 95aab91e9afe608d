"""Fashion-MNIST in its official IDX files, unpacked or not, as torchvision lays them out."""

from __future__ import annotations

import gzip
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from depthfold.errors import DataError
from depthfold.training.data.collection import Collection, Normal, Part
from depthfold.training.data.digest import digest
from depthfold.training.data.held import Held

_CLASSES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_PREFIX: dict[Part, str] = {"train": "train", "test": "t10k"}
_UBYTE = 0x08  # the kind of number, in the third byte of an IDX file; the fourth is how many dimensions there are


@dataclass(frozen=True, slots=True, kw_only=True)
class FashionMnist:
    """60,000 training and 10,000 test images of 10 classes, 28 x 28, of one channel."""

    normal: ClassVar[Normal] = ((0.2860,), (0.3530,))

    path: Path  # where FashionMNIST/raw lies, or one of these two folders

    @property
    def title(self) -> str:
        # What the files hold, as the same ones may lie packed here and unpacked there.
        images, labels = self._files("train")
        return f"Fashion-MNIST, {digest((_idx(images, dimensions=3).tobytes(), _idx(labels, dimensions=1).tobytes()))}"

    def read(self, part: Part) -> Collection:
        images, labels = self._files(part)
        pixels = _idx(images, dimensions=3)
        return Collection(
            where=f"{images.parent} ({part})",
            classes=_CLASSES,
            labels=torch.from_numpy(_idx(labels, dimensions=1).astype(np.int64)),
            keys=range(len(pixels)),
            pictures=Held(pixels=torch.from_numpy(pixels[:, None].copy())),
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
            f"Expected {name} or {name}.gz in {self.path}, in raw/ or in FashionMNIST/raw/ below it, found neither. "
            "Name the folder that holds FashionMNIST/raw, or fetch the files from "
            "https://github.com/zalandoresearch/fashion-mnist"
        )


def _idx(file: Path, dimensions: int) -> np.ndarray:
    """An IDX file: four bytes that say what it is, the length of each dimension, and the bytes themselves."""
    try:
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file} cannot be unpacked: {error}. Fetch it again.") from None
    expected = bytes((0, 0, _UBYTE, dimensions))
    if data[:4] != expected:
        raise DataError(
            f"{file} begins with 0x{data[:4].hex()}, expected the magic number 0x{expected.hex()} of an IDX file of "
            f"bytes in {dimensions} dimensions. It is another file; fetch it again."
        )
    start = 4 + 4 * dimensions
    lengths = struct.unpack(f">{dimensions}I", data[4:start]) if len(data) >= start else ()
    size = int(np.prod(lengths, dtype=object)) if lengths else 1
    if not lengths or len(data) - start != size:
        raise DataError(
            f"{file} has {len(data)} bytes, expected {start + size if lengths else f'{start} or more'} by its header. "
            "It was cut short; fetch it again."
        )
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(lengths)
