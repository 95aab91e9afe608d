"""Augmentation of a whole batch at once, where it is: every image in its own way.

Random numbers come in as uniform ones, one row per image, drawn on the CPU: what is chosen is known there, so nothing
waits for the device.
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
from depthfold.tasks.pictures import TRIES, rectangles
from depthfold.training.task import Step

# RandAugment (Cubuk et al., 2020), a batch at a time: each image draws its own operations.
#
# The images that drew the same operation are put through it together, so a batch takes a few dozen operations on the
# device and not hundreds. Operations and strengths are torchvision's, of magnitude 0 to 30.

MOST = 30  # the largest magnitude

# An operation: what it does to images, by torchvision's functions, with a strength from -1 to 1.
_Operation = Callable[[Any, Tensor, float], Tensor]


def _affine(f: Any, images: Tensor, *, across: int = 0, down: int = 0, shear: tuple[float, float] = (0, 0)) -> Tensor:
    degrees = [math.degrees(math.atan(side)) for side in shear]
    # Shearing keeps the top left corner where it is; for a shift, the centre makes no difference.
    centre = [0.0, 0.0] if any(shear) else None
    moved: Tensor = f.affine(images, angle=0.0, translate=[across, down], scale=1.0, shear=degrees, center=centre)
    return moved


def _colour(name: str) -> _Operation:
    return lambda f, images, strength: getattr(f, name)(images, 1.0 + 0.9 * strength)


# Those that have a direction are drawn with a strength of either sign.
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


def randaugment(images: Tensor, rows: np.ndarray, magnitude: int) -> Tensor:
    """`rows`: for every image and operation two uniform numbers, which operation and in which direction."""
    if images.dtype != torch.uint8:
        raise InvalidValue(
            f"RandAugment works on pixels from 0 to 255 in uint8, and these images are {images.dtype}. Give the task "
            "uint8 images, or the recipe randaugment=None."
        )
    if not 0 <= magnitude <= MOST:
        raise InvalidValue(f"The magnitude of RandAugment must lie between 0 and {MOST}, found {magnitude}.")
    images, names = images.clone(), tuple(OPERATIONS)
    for round_ in range(rows.shape[1]):
        drawn = np.minimum((rows[:, round_, 0] * len(names)).astype(np.int64), len(names) - 1)
        backwards = (rows[:, round_, 1] < 0.5) & (drawn < len(_DIRECTED))
        for number, sign in sorted({*zip(drawn.tolist(), backwards.tolist(), strict=True)}):
            group = torch.from_numpy(np.flatnonzero((drawn == number) & (backwards == sign))).to(images.device)
            strength = magnitude / MOST * (-1 if sign else 1)
            images[group] = operate(names[number], images[group], strength)
    return images


def operate(name: str, images: Tensor, strength: float) -> Tensor:
    """One operation on all images alike."""
    from depthfold.vision import import_torchvision  # deferred: the one place in training that needs torchvision

    import_torchvision()
    from torchvision.transforms.v2 import functional

    with torch.autocast(images.device.type, enabled=False):  # the caller's is for the model, not for coordinates
        return OPERATIONS[name](functional, images, strength)


_ERASED_AREA, _ERASED_RATIO = (0.02, 1 / 3), (0.3, 1 / 0.3)


def augment(images: Tensor, step: Step, of: int) -> Tensor:
    """What the step's recipe does to pixels before they are normalised. `of` is how many images there are to train on.
    A random part ("resized") has been taken when the images were read."""
    recipe = step.recipe
    if recipe.crop == "pad":
        images = pad_crop(images, uniform(step, "pad", of, 2))
    if recipe.flip:
        images = flip(images, uniform(step, "flip", of))
    if recipe.randaugment is not None:
        operations, magnitude = recipe.randaugment
        images = randaugment(images, uniform(step, "randaugment", of, operations, 2), magnitude)
    return images


def augment_normalised(images: Tensor, step: Step, of: int) -> Tensor:
    """What it does afterwards: noise in place of a rectangle. The noise is drawn on the device, for each process its
    own; the rectangles are not."""
    if not step.recipe.erasing:
        return images
    chosen = uniform(step, "erasing", of) < step.recipe.erasing
    return erase(images, chosen, uniform(step, "erased", of, TRIES, 4), step.generator("noise"))


def pad_crop(images: Tensor, rows: np.ndarray) -> Tensor:
    """Black borders, an eighth of each side, and a window of the old size out of it."""
    height, width = images.shape[-2:]
    y, x = height // 8, width // 8
    padded = torch.nn.functional.pad(images, (x, x, y, y))
    top, left = choice(rows[:, 0], 2 * y + 1), choice(rows[:, 1], 2 * x + 1)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view: every window there is
    everyone = torch.arange(len(images), device=images.device)
    return windows[everyone, :, top.to(images.device), left.to(images.device)]


def flip(images: Tensor, rows: np.ndarray) -> Tensor:
    """Left and right exchanged in one image of two."""
    flipped = torch.from_numpy(rows < 0.5).to(images.device, non_blocking=True)
    return torch.where(flipped[:, None, None, None], images.flip(-1), images)


def erase(images: Tensor, chosen: np.ndarray, rows: np.ndarray, noise: torch.Generator) -> Tensor:
    """Normal noise in a random rectangle of the chosen images, as the paper's recipe has it: they are normalised, so
    it looks like any other pixels."""
    height, width = images.shape[-2:]
    boxes, found = rectangles(rows, height, width, _ERASED_AREA, _ERASED_RATIO)
    which = np.flatnonzero(chosen & found)
    if not len(which):
        return images
    left, top, right, bottom = torch.from_numpy(boxes[which]).to(images.device).T[:, :, None]
    y, x = (torch.arange(side, device=images.device)[None] for side in (height, width))
    inside = ((y >= top) & (y < bottom))[:, :, None] & ((x >= left) & (x < right))[:, None, :]
    index = torch.from_numpy(which).to(images.device)
    pixels = torch.randn(len(which), *images.shape[1:], generator=noise, device=images.device, dtype=images.dtype)
    return images.index_copy(0, index, torch.where(inside[:, None], pixels, images[index]))


def choice(rows: np.ndarray, of: int) -> Tensor:
    """Uniform numbers from 0 to 1 as whole ones below `of`."""
    return torch.from_numpy(np.minimum((rows * of).astype(np.int64), of - 1))  # a product may be rounded up to `of`
