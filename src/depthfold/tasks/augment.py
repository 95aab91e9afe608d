"""Augmentation of a whole batch on its device, with different random choices for each image.

The random numbers are uniform, one row per image, and drawn on the CPU, so that no choice waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from depthfold.errors import InvalidValue
from depthfold.tasks.batches import uniform
from depthfold.tasks.images import TRIES, random_boxes
from depthfold.tasks.source import to_device
from depthfold.training import Step

# --- RandAugment (Cubuk et al., 2020) ---
#
# Each image draws its own operations, and each operation is applied once to all images that drew it. Operations and
# strengths are those of torchvision.

MAX_MAGNITUDE = 30

# (torchvision's functional module, images, strength from -1 to 1) -> images
_Operation = Callable[[Any, Tensor, float], Tensor]


def _affine(f: Any, images: Tensor, *, across: int = 0, down: int = 0, shear: tuple[float, float] = (0, 0)) -> Tensor:
    degrees = [math.degrees(math.atan(side)) for side in shear]
    # A shear leaves the top left corner unchanged; for a shift, the centre does not matter.
    centre = [0.0, 0.0] if any(shear) else None
    moved: Tensor = f.affine(images, angle=0.0, translate=[across, down], scale=1.0, shear=degrees, center=centre)
    return moved


def _colour(name: str) -> _Operation:
    return lambda f, images, strength: getattr(f, name)(images, 1.0 + 0.9 * strength)


# Operations with a direction: their strength may be negative.
_DIRECTED: dict[str, _Operation] = {
    "shear x": lambda f, images, strength: _affine(f, images, shear=(0.3 * strength, 0.0)),
    "shear y": lambda f, images, strength: _affine(f, images, shear=(0.0, 0.3 * strength)),
    "shift x": lambda f, images, strength: _affine(f, images, across=int(150 / 331 * images.shape[-1] * strength)),
    "shift y": lambda f, images, strength: _affine(f, images, down=int(150 / 331 * images.shape[-2] * strength)),
    "rotate": lambda f, images, strength: f.rotate(images, 30.0 * strength),
    "brightness": _colour("adjust_brightness"),
    "colour": _colour("adjust_saturation"),
    "contrast": _colour("adjust_contrast"),
    "sharpness": _colour("adjust_sharpness"),
}
_UNDIRECTED: dict[str, _Operation] = {
    "nothing": lambda f, images, strength: images,
    "posterise": lambda f, images, strength: f.posterize(images, round(8 - 4 * strength)),
    "solarise": lambda f, images, strength: f.solarize(images, 255 * (1 - strength)),
    "stretch": lambda f, images, strength: f.autocontrast(images),
    "equalise": lambda f, images, strength: f.equalize(images),
}
OPERATIONS: dict[str, _Operation] = _DIRECTED | _UNDIRECTED


def require_uint8(images: Tensor) -> None:
    if images.dtype != torch.uint8:
        raise InvalidValue(
            f"RandAugment needs uint8 images, found {images.dtype}. Give the task uint8 images, or the recipe "
            "randaugment=None."
        )


def randaugment(images: Tensor, rows: np.ndarray, magnitude: int) -> Tensor:
    """Apply RandAugment. `rows` has two uniform numbers per image and operation: the operation and its direction."""
    require_uint8(images)
    if not 0 <= magnitude <= MAX_MAGNITUDE:
        raise InvalidValue(f"The magnitude of RandAugment must be between 0 and {MAX_MAGNITUDE}, found {magnitude}.")
    images, names = images.clone(), tuple(OPERATIONS)
    for round_ in range(rows.shape[1]):
        drawn = np.minimum((rows[:, round_, 0] * len(names)).astype(np.int64), len(names) - 1)
        backwards = (rows[:, round_, 1] < 0.5) & (drawn < len(_DIRECTED))
        for number, sign in sorted({*zip(drawn.tolist(), backwards.tolist(), strict=True)}):
            group = to_device(np.flatnonzero((drawn == number) & (backwards == sign)), images.device)
            strength = magnitude / MAX_MAGNITUDE * (-1 if sign else 1)
            images[group] = apply_operation(names[number], images[group], strength)
    return images


def apply_operation(name: str, images: Tensor, strength: float) -> Tensor:
    """Apply one operation to all images."""
    from depthfold.vision import import_torchvision  # only RandAugment needs torchvision

    import_torchvision()
    from torchvision.transforms.v2 import functional

    with torch.autocast(images.device.type, enabled=False):  # coordinates need full precision
        return OPERATIONS[name](functional, images, strength)


# --- Other augmentations ---

_ERASED_AREA, _ERASED_RATIO = (0.02, 1 / 3), (0.3, 1 / 0.3)


def augment(images: Tensor, step: Step, total: int) -> Tensor:
    """Augment images before they are normalised. `total` is the size of the training set.

    Random crops of the kind "resized" are taken when the images are read.
    """
    recipe = step.recipe
    if recipe.crop == "pad":
        images = pad_crop(images, uniform(step, "pad", total, 2))
    if recipe.flip:
        images = flip(images, uniform(step, "flip", total))
    if recipe.randaugment is not None:
        operations, magnitude = recipe.randaugment
        images = randaugment(images, uniform(step, "randaugment", total, operations, 2), magnitude)
    return images


def augment_normalised(images: Tensor, step: Step, total: int) -> Tensor:
    """Augment normalised images: replace a random box with noise. The noise is drawn on the device, per process."""
    if not step.recipe.erasing:
        return images
    chosen = uniform(step, "erasing", total) < step.recipe.erasing
    return erase(images, chosen, uniform(step, "erased", total, TRIES, 4), step.generator("noise"))


def pad_crop(images: Tensor, rows: np.ndarray) -> Tensor:
    """Pad each side by an eighth with black, and crop a random window of the original size."""
    height, width = images.shape[-2:]
    y, x = height // 8, width // 8
    padded = torch.nn.functional.pad(images, (x, x, y, y))
    limits = np.array([2 * y + 1, 2 * x + 1])
    corners = np.minimum((rows * limits).astype(np.int64), limits - 1)  # the product may be rounded up
    top, left = to_device(corners.T.copy(), images.device)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view of all windows
    every = torch.arange(len(images), device=images.device)
    return windows[every, :, top, left]


def flip(images: Tensor, rows: np.ndarray) -> Tensor:
    """Mirror half of the images horizontally."""
    flipped = to_device(rows < 0.5, images.device)
    return torch.where(flipped[:, None, None, None], images.flip(-1), images)


def erase(images: Tensor, chosen: np.ndarray, rows: np.ndarray, noise: torch.Generator) -> Tensor:
    """Replace a random box of the chosen images with normal noise, as the paper does."""
    height, width = images.shape[-2:]
    boxes, found = random_boxes(rows, height, width, _ERASED_AREA, _ERASED_RATIO)
    which = np.flatnonzero(chosen & found)
    if not len(which):
        return images
    left, top, right, bottom = to_device(boxes[which], images.device).T[:, :, None]
    y, x = (torch.arange(side, device=images.device)[None] for side in (height, width))
    inside = ((y >= top) & (y < bottom))[:, :, None] & ((x >= left) & (x < right))[:, None, :]
    index = to_device(which, images.device)
    pixels = torch.randn(len(which), *images.shape[1:], generator=noise, device=images.device, dtype=images.dtype)
    return images.index_copy(0, index, torch.where(inside[:, None], pixels, images[index]))
