"""Images in memory, and the geometry of crops.

Boxes are (left, top, right, bottom) in pixels, as in Pillow. All random numbers are passed in as uniform ones, so that
images in memory and images in files get the same crops.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from depthfold.tasks.source import BatchRequest, Size, to_device

TRIES = 10  # random boxes per image; the first one that fits is used
_AREA, _RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # of a random crop, as in torchvision's RandomResizedCrop


def centre_box(height: int, width: int, size: Size | None, crop_ratio: float) -> np.ndarray:
    """Return the largest centred box with the shape of `size`, scaled by `crop_ratio`.

    A ratio of 0.875 and a size of 224 correspond to resizing to 256 and cropping 224.
    """
    if size is None:
        return np.array([[0.0, 0.0, width, height]])
    scale = min(height / size[0], width / size[1]) * crop_ratio
    y, x = size[0] * scale / 2, size[1] * scale / 2
    box = np.array([[width / 2 - x, height / 2 - y, width / 2 + x, height / 2 + y]])
    return box.clip(0, [width, height, width, height])  # rounding may exceed the image


def crop_boxes(uniform: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return a random crop for each row of uniform numbers (N x TRIES x 4)."""
    boxes, found = random_boxes(uniform, height, width, _AREA, _RATIO)
    # If no try fits, which needs a very long image: the largest centred box of an allowed ratio.
    x = min(width, height * _RATIO[1]) / 2
    y = min(height, width / _RATIO[0]) / 2
    boxes[~found] = (width / 2 - x, height / 2 - y, width / 2 + x, height / 2 + y)
    return boxes


def random_boxes(
    uniform: np.ndarray, height: int, width: int, area: tuple[float, float], ratio: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray]:
    """Return random boxes within an image, and a mask of those that were found.

    The area is uniform, and so is the logarithm of the aspect ratio. Each box is the first of its tries that fits.
    """
    areas = height * width * (area[0] + uniform[..., 0] * (area[1] - area[0]))
    low, high = math.log(ratio[0]), math.log(ratio[1])
    ratios = np.exp(low + uniform[..., 1] * (high - low))
    widths, heights = np.rint(np.sqrt(areas * ratios)), np.rint(np.sqrt(areas / ratios))
    fits = (widths >= 1) & (widths <= width) & (heights >= 1) & (heights <= height)
    first = np.arange(len(uniform)), fits.argmax(axis=1)
    w, h = widths[first], heights[first]
    top = np.floor(uniform[..., 2][first] * (height - h + 1))
    left = np.floor(uniform[..., 3][first] * (width - w + 1))
    return np.stack([left, top, left + w, top + h], axis=1), fits[first]


def resample(images: Tensor, boxes: np.ndarray, size: Size | None) -> Tensor:
    """Resize the boxes of a batch (one for all images, or one each), bilinear with antialiasing, as Pillow does.

    Each side is a product with a matrix of weights. So a batch with different boxes is one deterministic operation, and
    it does not alias, as sampling from a grid on a GPU would.
    """
    height, width = images.shape[-2:]
    to = size or (height, width)
    if to == (height, width) and np.array_equal(boxes, [[0.0, 0.0, width, height]]):
        return images
    left, top, right, bottom = to_device(boxes.astype(np.float32), images.device).T
    rows, columns = _weights(top, bottom, height, to[0]), _weights(left, right, width, to[1])
    with torch.autocast(images.device.type, enabled=False):  # bfloat16 has too few bits for pixels
        resized = rows[:, None] @ images.float() @ columns[:, None].mT
    return resized.round_().clamp_(0, 255).to(torch.uint8) if images.dtype == torch.uint8 else resized.to(images.dtype)


def _weights(start: Tensor, end: Tensor, inputs: int, outputs: int) -> Tensor:
    """Return the weight of each input pixel for each output pixel: N x outputs x inputs."""
    scale = ((end - start) / outputs)[:, None, None]
    centres = torch.arange(max(inputs, outputs), device=start.device) + 0.5
    sampled = start[:, None, None] + centres[:outputs, None] * scale
    weights = (1 - (centres[:inputs] - sampled).abs() / scale.clamp(min=1.0)).clamp(min=0.0)
    return weights / weights.sum(dim=2, keepdim=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryImages:
    """Images in memory: N x C x H x W, uint8 (0..255) or float. `crop_ratio` applies to centre crops."""

    pixels: Tensor
    crop_ratio: float = 1.0
    _copies: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.pixels)

    def subset(self, indices: Sequence[int]) -> MemoryImages:
        return MemoryImages(pixels=self.pixels[torch.tensor(indices, dtype=torch.int64)], crop_ratio=self.crop_ratio)

    def cached(self, size: Size | None, *, cropped: bool) -> MemoryImages:
        return self

    def read(self, requests: Iterable[BatchRequest], size: Size | None, device: torch.device) -> Iterator[Tensor]:
        pixels = self._on(device)
        height, width = pixels.shape[-2:]
        for request in requests:
            images = pixels[to_device(request.indices, device)]
            if request.crop is None:
                boxes = centre_box(height, width, size, self.crop_ratio)
            else:
                boxes = crop_boxes(request.crop, height, width)
            yield resample(images, boxes, size)

    def _on(self, device: torch.device) -> Tensor:
        """Return the pixels on the device. They are copied once, so a step transfers only its indices."""
        if device not in self._copies:
            self._copies[device] = self.pixels.to(device)
        return self._copies[device]
