"""ClassificationTask: the built-in task."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from depthfold.errors import DataError, InvalidValue
from depthfold.progress import Progress
from depthfold.support.coerce import as_path, as_whole
from depthfold.tasks.augment import augment, augment_normalised, require_uint8
from depthfold.tasks.batches import steps_per_epoch
from depthfold.tasks.datasets import Cifar10, Cifar100, FashionMnist, InMemory, Pair
from depthfold.tasks.image_folder import FileImages, ImageFolder, check_files, class_list, digest_of_files
from depthfold.tasks.loaders import loaders
from depthfold.tasks.preprocessing import Preprocessing
from depthfold.tasks.source import BatchRequest, MeanStd, Size, Source, as_mean_std, as_size, normalise_images
from depthfold.tasks.splits import LoadedSplits, check_holdout
from depthfold.tracing import device_of, dtype_of
from depthfold.training import Recipe, Split, Step

_MAIN = ("logits", "out")  # names of the main output, if a model has several
_CPU = torch.device("cpu")


def classification_loss(output: Any, images: Tensor, labels: Tensor, classes: int, step: Step) -> Tensor:
    """Return the cross-entropy with the labels, or a mixture with the teacher's outputs if there is a teacher.

    The part with the teacher uses the temperature T and is multiplied by T^2, so that the size of its gradient does not
    depend on T. As in the paper, there is then no label smoothing.
    """
    recipe, logits = step.recipe, class_scores(output, classes)
    if step.teacher is None:
        return functional.cross_entropy(logits, labels, label_smoothing=recipe.label_smoothing)
    with torch.no_grad():
        targets = (class_scores(step.teacher(images), classes) / recipe.temperature).softmax(dim=1)
    soft = functional.cross_entropy(logits / recipe.temperature, targets) * recipe.temperature**2
    hard = functional.cross_entropy(logits, labels)
    return recipe.distillation * soft + (1.0 - recipe.distillation) * hard


def class_scores(output: Any, classes: int) -> Tensor:
    """Return the main output, in float32 or float64. Raise DataError unless it has one number per class."""
    logits = main_output(output)
    if logits.ndim != 2 or logits.shape[1] != classes:
        raise DataError(
            f"The model's output has the shape {tuple(logits.shape)}, expected (batch, {classes}) for the {classes} "
            "classes of the data. Replace the model's last layer, or use other data."
        )
    return logits if logits.dtype == torch.float64 else logits.float()


def main_output(output: Any) -> Tensor:
    """Return the output named logits or out, otherwise the first one, if there are several (as in Inception)."""
    found = output
    while not isinstance(found, Tensor):
        named = found if isinstance(found, Mapping) else {name: getattr(found, name, None) for name in _MAIN}
        inner = next((named[name] for name in _MAIN if named.get(name) is not None), None)
        if inner is None and isinstance(found, Mapping | Sequence) and not isinstance(found, str) and len(found):
            inner = next(iter(found.values() if isinstance(found, Mapping) else found))
        if inner is None:
            raise DataError(
                f"The model returned {type(output).__name__}, expected a tensor, or an object with a tensor as "
                "'logits', 'out' or first item."
            )
        found = inner
    return found


class Options(TypedDict, total=False):
    """The options that all constructors of ClassificationTask share."""

    size: int | Size | None
    normalise: MeanStd | None
    holdout: float | int
    seed: int
    score_batch: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClassificationTask:
    """Image classification. The score is the top-1 accuracy in per cent.

    - `size`: resize all images to this number or (height, width); None: do not resize.
    - `normalise`: (means, deviations) by channel, of values from 0 to 1; None: those of the dataset.
    - `holdout`: the part of the training set that is never trained on, and that importances are scored on. It is a
      share of each class, or a number of images per class (50 in the paper). With 0, only "test" can be scored.
    - `seed` selects the hold-out images. `score_batch` is the batch size for scoring.

    Data is read on first use, in the process that uses it, and the test set only when "test" is scored or counted. The
    training set is kept in memory on the device, except for image files that do not fit (see FileImages.cached).
    """

    source: Source
    size: int | Size | None = None
    normalise: MeanStd | None = None
    holdout: float | int = 0.1
    seed: int = 0
    score_batch: int = 512
    _data: LoadedSplits = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_holdout(self.holdout)
        as_whole("score_batch", self.score_batch, InvalidValue)
        # A plain int, because the split depends on the repr of the seed.
        object.__setattr__(self, "seed", as_whole("The seed of a task", self.seed, InvalidValue, least=0))
        size = None if self.size is None else as_size(self.size)
        object.__setattr__(self, "size", size)
        if self.normalise is not None:
            object.__setattr__(self, "normalise", as_mean_std(self.normalise))
        object.__setattr__(self, "_data", LoadedSplits(self.source, size, self.holdout, self.seed))

    @classmethod
    def cifar10(cls, path: str | os.PathLike[str], **options: Unpack[Options]) -> Self:
        """Return a task for CIFAR-10 in the binary layout: the folder cifar-10-batches-bin or its parent."""
        return cls(source=Cifar10(path=_absolute(path)), **options)

    @classmethod
    def cifar100(cls, path: str | os.PathLike[str], **options: Unpack[Options]) -> Self:
        """Return a task for CIFAR-100 in the binary layout: the folder cifar-100-binary or its parent."""
        return cls(source=Cifar100(path=_absolute(path)), **options)

    @classmethod
    def fashion_mnist(cls, path: str | os.PathLike[str], **options: Unpack[Options]) -> Self:
        """Return a task for Fashion-MNIST: the folder FashionMNIST/raw, as in torchvision, or one of its parents."""
        return cls(source=FashionMnist(path=_absolute(path)), **options)

    @classmethod
    def image_folder(
        cls,
        path: str | os.PathLike[str],
        *,
        classes: str | os.PathLike[str] | Iterable[str] | None = None,
        train: str = "train",
        test: str = "val",
        crop_ratio: float = 0.875,
        workers: int | None = None,
        memory: int = 2 * 10**9,
        **options: Unpack[Options],
    ) -> Self:
        """Return a task for the folders `train` and `test`, with a folder per class in each.

        `classes` selects classes, for example those of ImageNet-100: a list of names, or a file with one per line.
        Labels follow its order. `crop_ratio` is the part of the image that is scored (0.875 with size=224: resize to
        256, crop 224); without a size, whole images are scored. `workers` and `memory` are those of FileImages.
        """
        names = None if classes is None else class_list(classes)
        folder = _absolute(path)
        source = ImageFolder(
            path=folder, classes=names, train=train, test=test, crop_ratio=crop_ratio, workers=workers, memory=memory
        )
        return cls(source=source, **options)

    @classmethod
    def tensors(cls, *, train: Pair, test: Pair | None = None, **options: Unpack[Options]) -> Self:
        """Return a task for images (N x C x H x W, uint8 or float) and labels, which are pickled with the task."""
        return cls(source=InMemory(train=train, test=test), **options)

    @classmethod
    def from_loaders(
        cls,
        *,
        train: DataLoader[Any],
        holdout: DataLoader[Any],
        test: DataLoader[Any] | None = None,
        classes: Iterable[str] | None = None,
        normalise: MeanStd | None = None,
        score_batch: int = 512,
    ) -> Self:
        """Return a task for DataLoaders whose batches are (images, labels).

        The items come from the datasets of the loaders, through their collate functions and with their number of
        workers. The batch size and the order are those of the recipe and the step, so that training can resume. The
        images have one size. Float images are not normalised, and uint8 images are divided by 255, unless `normalise`
        is given. `classes` are the names of the classes; by default those of the training dataset, or numbers.
        """
        source = loaders(train=train, holdout=holdout, test=test, classes=classes)
        return cls(source=source, normalise=normalise, holdout=0, score_batch=score_batch)

    @property
    def identity(self) -> str:
        """Text with everything that a score depends on: the data, how it is normalised and split; not its path."""
        options = f"size {self.size}, normalised by {self._mean_std}"
        return f"{self._data.identity}, {options}, holdout {self.holdout}, seed {self.seed}"

    @property
    def has_holdout(self) -> bool:
        """False if there is no hold-out set, so that only "test" can be scored."""
        return self._data.has_holdout

    def example(self) -> Tensor:
        """Return a batch with one normalised image of the training set."""
        return self._normalised(self._first_image())

    @property
    def preprocessing(self) -> Preprocessing:
        """How an image becomes an input of the network, as export() writes it to a file."""
        pixels = self._first_image()
        channels, height, width = pixels.shape[1:]
        mean, deviation = (values * channels if len(values) == 1 else values for values in self._mean_std)
        crop_ratio = 1.0 if self.size is None else getattr(self.source, "crop_ratio", 1.0)  # see images.centre_box
        return Preprocessing(
            channels=channels, size=(height, width), mean=mean, deviation=deviation, classes=self._data.train.classes,
            crop_ratio=crop_ratio, uint8=pixels.dtype == torch.uint8,
        )  # fmt: skip

    @property
    def classes(self) -> int:
        return len(self._data.train.classes)

    def count(self, split: Split) -> int:
        """Return the number of images of a split."""
        return len(self._data.scored(split))

    def is_chance(self, score: float, split: Split) -> bool:
        """Return True if an accuracy in per cent is at most that of guessing, plus two standard errors for noise.

        With few images this would say little: return False if half of the way from guessing to 100 % is noise.
        """
        guessed = 1.0 / self.classes
        noise = 2.0 * math.sqrt(guessed * (1.0 - guessed) / self.count(split))
        return noise < (1.0 - guessed) / 2.0 and score / 100.0 <= guessed + noise

    def check_files(self, known: Mapping[str, str], progress: Progress, *, tested: bool = True) -> dict[str, str]:
        """Decode every image file once, and return a digest of the files of each split; empty if there are no files.

        A split whose digest is `known` is not decoded. Raise DataError with the first files that cannot be decoded, or,
        without a size, with two files of different sizes.
        """
        holdout = (self._data.scored("holdout"),) if self.has_holdout else ()
        splits = {"train": (self._data.train, *holdout)} | ({"test": (self._data.scored("test"),)} if tested else {})
        files = {
            name: [path for part in parts if isinstance(part.images, FileImages) for path in part.images.paths]
            for name, parts in splits.items()
        }
        found = {name: digest_of_files(paths) for name, paths in files.items() if paths}
        if unknown := [path for name in found if known.get(name) != found[name] for path in files[name]]:
            check_files(unknown, progress, like=files["train"][0] if self.size is None else None)
        return found

    def check_augmentation(self, recipe: Recipe) -> None:
        """Raise InvalidValue if the images cannot be augmented as the recipe asks."""
        if recipe.randaugment is not None:
            require_uint8(self._first_image())

    def steps_per_epoch(self, recipe: Recipe) -> int:
        """Return the number of whole batches in the training set, without the hold-out set."""
        return steps_per_epoch(len(self._data.train), recipe.batch)

    def loss(self, model: nn.Module, step: Step) -> Tensor:
        """Return the loss of this process's part of the batch."""
        return self.batch_loss(model, self.batch(step), step)

    def batch_loss(self, model: nn.Module, batch: tuple[Tensor, ...], step: Step) -> Tensor:
        """Return the loss of images and labels that batch() has returned."""
        images, labels = batch
        images = images.to(dtype_of(model))
        return classification_loss(model(images), images, labels, self.classes, step)

    @torch.no_grad()
    def batch(self, step: Step) -> tuple[Tensor, Tensor]:
        """Return the images of a step, augmented and normalised, and their labels. They depend only on the step."""
        pixels, indices = self._data.reader(cropped=step.recipe.crop == "resized").batch(step)
        total = len(self._data.train)
        images = augment_normalised(self._normalised(augment(pixels, step, total)), step, total)
        if step.recipe.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return images, self._data.labels_on(step.device)[indices]

    @torch.no_grad()
    def score(self, model: nn.Module, split: Split) -> float:
        """Return the accuracy in per cent, on the device of the model and in its precision, or that of an autocast."""
        labels = self._data.cached(split).labels.to(device_of(model))
        return 100.0 * (self.outputs(model, split).argmax(dim=1) == labels).sum().item() / len(labels)

    @torch.no_grad()
    def outputs(self, model: nn.Module, split: Split) -> Tensor:
        """Return the class scores of all images of a split, one row per image."""
        subset = self._data.cached(split)
        device, dtype = device_of(model), dtype_of(model)
        starts = range(0, len(subset), self.score_batch)
        indices = [np.arange(start, min(start + self.score_batch, len(subset))) for start in starts]
        batches = subset.images.read((BatchRequest(indices=part) for part in indices), self._size, device)
        classes = len(subset.classes)
        return torch.cat([class_scores(model(self._normalised(pixels).to(dtype)), classes) for pixels in batches])

    def divergences(self, outputs: Tensor, reference: Tensor) -> Tensor:
        """Return the Kullback-Leibler divergence of each row of class scores from the reference."""
        one, two = (scores.float().log_softmax(dim=1) for scores in (outputs, reference))
        return torch.nn.functional.kl_div(one, two, log_target=True, reduction="none").sum(dim=1)

    @property
    def _size(self) -> Size | None:
        return self.size  # type: ignore[return-value]  # converted by __post_init__

    @property
    def _mean_std(self) -> MeanStd:
        return self.normalise or self.source.mean_std

    def _first_image(self) -> Tensor:
        request = BatchRequest(indices=np.arange(1))
        return next(iter(self._data.train.images.read([request], self._size, _CPU)))

    def _normalised(self, images: Tensor) -> Tensor:
        return normalise_images(images, self._mean_std)


def _absolute(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path: another process may have another working directory."""
    return as_path("The path of a dataset", path, InvalidValue).expanduser().absolute()
