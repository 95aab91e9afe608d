"""Images that are in memory already, as tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from depthfold.core.wording import one_line
from depthfold.errors import DataError, InvalidValue
from depthfold.training.data.collection import Collection, Normal, Part
from depthfold.training.data.digest import digest
from depthfold.training.data.held import Held

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InMemory:
    """Images (N x C x H x W, uint8 or float) and their labels (N whole numbers), of which the test part may lack.

    Images in uint8 are normalised by their own mean and deviation; those in float are taken to be as they should.
    """

    train: Pair = field(repr=False)
    test: Pair | None = field(default=None, repr=False)
    classes: tuple[str, ...] = field(default=(), repr=False)
    normal: Normal = field(init=False)

    def __post_init__(self) -> None:
        train = _checked("train", self.train)
        test = None if self.test is None else _checked("test", self.test)
        if test is not None and (test[0].shape[1], test[0].dtype) != (train[0].shape[1], train[0].dtype):
            raise DataError(
                f"The test images have {test[0].shape[1]} channels of {test[0].dtype}, the training images "
                f"{train[0].shape[1]} of {train[0].dtype}; expected the same."
            )
        classes = self.classes or tuple(map(str, range(int(train[1].max()) + 1)))
        values = {"train": train, "test": test, "classes": classes, "normal": _normal(train[0])}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def title(self) -> str:
        found = digest(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in self.train)
        return f"{len(self.train[0])} images in memory, {found}"

    def read(self, part: Part) -> Collection:
        pair = self.train if part == "train" else self.test
        if pair is None:
            raise DataError("This task has no test images. Give ClassificationTask.tensors test=(images, labels).")
        return Collection(
            where=f"The {part} part in memory",
            classes=self.classes,
            labels=pair[1],
            keys=range(len(pair[0])),
            pictures=Held(pixels=pair[0]),
        )


def _checked(part: str, pair: Pair) -> Pair:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        found = f"{len(pair)} things" if isinstance(pair, tuple | list) else type(pair).__name__
        raise InvalidValue(f"{part} must be a pair of tensors, {part}=(images, labels); found {found}.")
    images, labels = _tensor(f"{part} images", pair[0]), _tensor(f"{part} labels", pair[1])
    if images.ndim != 4 or not (images.dtype == torch.uint8 or images.is_floating_point()):
        raise DataError(
            f"The {part} images are {images.dtype} of shape {tuple(images.shape)}, expected uint8 (0 to 255) or float "
            "of shape (number, channels, height, width)."
        )
    if labels.shape != images.shape[:1] or labels.is_floating_point() or labels.is_complex() or not len(labels):
        raise DataError(
            f"The {part} labels are {labels.dtype} of shape {tuple(labels.shape)}, expected one whole number for each "
            f"of the {len(images)} images, of which there must be some."
        )
    return images, labels.long()


def _tensor(what: str, value: object) -> Tensor:
    try:
        return torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:  # PyTorch's three ways to say that it cannot
        raise InvalidValue(
            f"The {what} must be a tensor, found {type(value).__name__}: {one_line(error)}. Make a tensor of it first."
        ) from error


def _normal(images: Tensor) -> Normal:
    if images.dtype != torch.uint8:
        return (0.0,), (1.0,)
    # From how often each of the 256 values occurs: exact, so the same on every machine.
    values = torch.arange(256, dtype=torch.float64) / 255
    counts = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in images.unbind(1)]).double()
    shares = counts / counts.sum(dim=1, keepdim=True)
    means = shares @ values
    deviations = (shares @ values.square() - means.square()).clamp(min=0.0).sqrt()
    # A channel that is one colour throughout has no deviation, and none to divide by.
    return tuple(means.tolist()), tuple(deviation or 1.0 for deviation in deviations.tolist())
