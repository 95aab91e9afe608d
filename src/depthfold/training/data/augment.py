"""Augmentation of a whole batch at once, where it is: every image in its own way.

Random numbers come in as uniform ones, one row per image, drawn on the CPU: what is chosen is known there, so nothing
waits for the device.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from depthfold.training.data.geometry import TRIES, rectangles
from depthfold.training.data.order import uniform
from depthfold.training.data.randaugment import randaugment
from depthfold.training.task import Step

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
