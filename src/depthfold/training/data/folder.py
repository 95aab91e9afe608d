"""A folder of image files: train/ and val/, and in each a folder for every class."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from depthfold.core.coerce import as_tuple_of
from depthfold.core.wording import count, did_you_mean
from depthfold.errors import DataError, InvalidValue
from depthfold.training.data.collection import Collection, Normal, Part, listed
from depthfold.training.data.digest import digest
from depthfold.training.data.files import Files

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
        found = digest((*map(os.fsencode, listing), *(_first(folder / name) for name in classes)))
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
