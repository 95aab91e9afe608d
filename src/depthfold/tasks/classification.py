"""The built-in task: images into classes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from depthfold.errors import DataError, InvalidValue
from depthfold.support.coerce import as_path, as_whole
from depthfold.tasks.augment import augment, augment_normalised
from depthfold.tasks.batches import Loaded, steps_per_epoch
from depthfold.tasks.collection import Normal, Request, Size, Source, as_normal, as_size, check_holdout, normalised
from depthfold.tasks.datasets import Cifar10, Cifar100, FashionMnist, InMemory, Pair
from depthfold.tasks.image_folder import ImageFolder, class_list
from depthfold.tracing import device_of, dtype_of
from depthfold.training.recipe import Recipe
from depthfold.training.task import Split, Step

# The loss of classification, with or without a teacher, and the output that counts.

_MAIN = ("logits", "out")


def classification_loss(output: Any, images: Tensor, labels: Tensor, classes: int, step: Step) -> Tensor:
    """Cross-entropy. With a teacher, a share of it is that with the teacher's outputs, softened by the temperature T
    and times T^2, so that its gradient does not depend on T; the labels are then not smoothed, as in the paper."""
    recipe, logits = step.recipe, class_scores(output, classes)
    if step.teacher is None:
        return functional.cross_entropy(logits, labels, label_smoothing=recipe.label_smoothing)
    with torch.no_grad():
        targets = (class_scores(step.teacher(images), classes) / recipe.temperature).softmax(dim=1)
    soft = functional.cross_entropy(logits / recipe.temperature, targets) * recipe.temperature**2
    hard = functional.cross_entropy(logits, labels)
    return recipe.distillation * soft + (1.0 - recipe.distillation) * hard


def class_scores(output: Any, classes: int) -> Tensor:
    """The main output, in float32 or better: one number for each class."""
    logits = main_output(output)
    if logits.ndim != 2 or logits.shape[1] != classes:
        raise DataError(
            f"The model's output has the shape {tuple(logits.shape)}, and the data has {classes} classes: expected "
            f"(batch, {classes}). Replace the model's last layer, or choose other data."
        )
    return logits if logits.dtype == torch.float64 else logits.float()


def main_output(output: Any) -> Tensor:
    """Of a model with several outputs (Inception and GoogLeNet in training, say) the one named logits or out, or else
    the first."""
    found = output
    while not isinstance(found, Tensor):
        named = found if isinstance(found, Mapping) else {name: getattr(found, name, None) for name in _MAIN}
        inner = next((named[name] for name in _MAIN if named.get(name) is not None), None)
        if inner is None and isinstance(found, Mapping | Sequence) and not isinstance(found, str) and len(found):
            inner = next(iter(found.values() if isinstance(found, Mapping) else found))
        if inner is None:
            raise DataError(
                f"The model returned {type(output).__name__}, expected a tensor, or something that has one as "
                "'logits', as 'out', or as its first item."
            )
        found = inner
    return found


_CPU = torch.device("cpu")


class Options(TypedDict, total=False):
    """What every constructor of ClassificationTask takes, too. See there."""

    size: int | Size | None
    normalise: Normal | None
    holdout: float | int
    seed: int
    score_batch: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClassificationTask:
    """Images into classes. The score is the accuracy (top-1) in percentage points, 0 to 100.

    `size` is what the images are brought to, a number or (height, width); None: as they are. `normalise` is (means,
    deviations) by channel, of values from 0 to 1; None: the dataset's own. `holdout` is the part of the training set
    that is never trained on and that importances are scored on: a share of each class, or a number of images of each
    class (the paper's is 50; with 0 there is none, and only "test" can be scored); `seed` chooses it. `score_batch` is
    the batch in which models are scored.

    Data is read when it is first used, in the process that uses it, and the test set only when "test" is scored or
    counted. The training set is in memory, on the step's device, unless it consists of files that do not fit (see
    Files.settle).
    """

    source: Source
    size: int | Size | None = None
    normalise: Normal | None = None
    holdout: float | int = 0.1
    seed: int = 0
    score_batch: int = 512
    _data: Loaded = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_holdout(self.holdout)
        as_whole("score_batch", self.score_batch, InvalidValue)
        # The int itself: the split is drawn by it, and two that look alike must be alike.
        object.__setattr__(self, "seed", as_whole("The seed of a task", self.seed, InvalidValue, least=0))
        size = None if self.size is None else as_size(self.size)
        object.__setattr__(self, "size", size)
        if self.normalise is not None:
            object.__setattr__(self, "normalise", as_normal(self.normalise))
        object.__setattr__(self, "_data", Loaded(self.source, size, self.holdout, self.seed))

    @classmethod
    def cifar10(cls, path: str | os.PathLike[str], **options: Unpack[Options]) -> Self:
        """CIFAR-10 in its binary layout: the folder cifar-10-batches-bin, or the one that it lies in."""
        return cls(source=Cifar10(path=_absolute(path)), **options)

    @classmethod
    def cifar100(cls, path: str | os.PathLike[str], **options: Unpack[Options]) -> Self:
        """CIFAR-100 in its binary layout: the folder cifar-100-binary, or the one that it lies in."""
        return cls(source=Cifar100(path=_absolute(path)), **options)

    @classmethod
    def fashion_mnist(cls, path: str | os.PathLike[str], **options: Unpack[Options]) -> Self:
        """Fashion-MNIST as torchvision has it: the folder in which FashionMNIST/raw lies, or one of these two."""
        return cls(source=FashionMnist(path=_absolute(path)), **options)

    @classmethod
    def image_folder(
        cls,
        path: str | os.PathLike[str],
        *,
        classes: str | os.PathLike[str] | Iterable[str] | None = None,
        train: str = "train",
        test: str = "val",
        share: float = 0.875,
        workers: int | None = None,
        memory: int = 2 * 10**9,
        **options: Unpack[Options],
    ) -> Self:
        """Folders `train` and `test`, with a folder for every class in them.

        `classes` chooses among them, by a list of names or a file with one a line, and labels follow its order: for
        ImageNet-100, its list. `share` of the centre is seen in scoring (0.875 and size=224: resized to 256, cropped
        to 224). `workers` and `memory`: see Files.
        """
        names = None if classes is None else class_list(classes)
        folder = _absolute(path)
        source = ImageFolder(
            path=folder, classes=names, train=train, test=test, share=share, workers=workers, memory=memory
        )
        return cls(source=source, **options)

    @classmethod
    def tensors(cls, *, train: Pair, test: Pair | None = None, **options: Unpack[Options]) -> Self:
        """Images in memory, with their labels: N x C x H x W, uint8 or float. These travel with the task."""
        return cls(source=InMemory(train=train, test=test), **options)

    @property
    def identity(self) -> str:
        """Which data, and how it is seen and split: what a score depends on. Not where the data lies, which may differ
        from machine to machine."""
        seen = f"size {self.size}, normalised by {self.normalise or self.source.normal}"
        return f"{self._data.title}, {seen}, holdout {self.holdout}, seed {self.seed}"

    @property
    def holds_out(self) -> bool:
        """Whether anything is held out; otherwise "holdout" cannot be scored."""
        return self.holdout != 0

    def example(self) -> Tensor:
        """An image of the training set, normalised, as a batch of one: what a model takes."""
        pixels = next(iter(self._data.train.pictures.read([Request(indices=np.arange(1))], self._pair, _CPU)))
        return self._normalised(pixels)

    @property
    def classes(self) -> int:
        return len(self._data.train.classes)

    def count(self, split: Split) -> int:
        """How many images a score on this split is over."""
        return len(self._data.found(split))

    def steps_per_epoch(self, recipe: Recipe) -> int:
        """Steps of the recipe's batch that see the training set once, without the hold-out; a rest is dropped."""
        return steps_per_epoch(len(self._data.train), recipe.batch)

    def loss(self, model: nn.Module, step: Step) -> Tensor:
        """The loss of the step's batch, of this process's part of it."""
        images, labels = self.batch(step)
        images = images.to(dtype_of(model))
        return classification_loss(model(images), images, labels, self.classes, step)

    @torch.no_grad()
    def batch(self, step: Step) -> tuple[Tensor, Tensor]:
        """The images of a step, augmented and normalised, and their labels; it follows from the step alone."""
        pixels, indices = self._data.feed(cropped=step.recipe.crop == "resized").batch(step)
        of = len(self._data.train)
        images = augment_normalised(self._normalised(augment(pixels, step, of)), step, of)
        if step.recipe.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return images, self._data.labels_on(step.device)[indices]

    @torch.no_grad()
    def score(self, model: nn.Module, split: Split) -> float:
        """The accuracy in percentage points, on the model's own device and in its own precision."""
        subset = self._data.scored(split)
        device, dtype = device_of(model), dtype_of(model)
        starts = range(0, len(subset), self.score_batch)
        indices = [np.arange(start, min(start + self.score_batch, len(subset))) for start in starts]
        batches = subset.pictures.read((Request(indices=part) for part in indices), self._pair, device)
        right = torch.zeros((), dtype=torch.int64, device=device)
        for part, pixels in zip(indices, batches, strict=True):
            logits = class_scores(model(self._normalised(pixels).to(dtype)), len(subset.classes))
            right += (logits.argmax(dim=1) == subset.labels[part].to(device)).sum()
        return 100.0 * right.item() / len(subset)

    @property
    def _pair(self) -> Size | None:
        return self.size  # type: ignore[return-value]  # made a pair by __post_init__

    def _normalised(self, images: Tensor) -> Tensor:
        return normalised(images, self.normalise or self.source.normal)


def _absolute(path: str | os.PathLike[str]) -> Path:
    """A task may be used by a process that was started elsewhere."""
    return as_path("The place of a dataset", path, InvalidValue).expanduser().absolute()
