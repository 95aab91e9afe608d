"""RandAugment (Cubuk et al., 2020), a batch at a time: each image draws its own operations.

The images that drew the same operation are put through it together, so a batch takes a few dozen operations on the
device and not hundreds. Operations and strengths are torchvision's, of magnitude 0 to 30.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from depthfold.errors import InvalidValue

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
