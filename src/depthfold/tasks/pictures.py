"""Pictures in memory: on the device they are used on, as they are, and read there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from depthfold.tasks.collection import Request, Size

# Which part of an image is seen, and how it is brought to a size.
#
# Parts are boxes (left, top, right, bottom) in pixels, as Pillow has them. All random numbers come in as uniform ones,
# so that images in memory and images in files see the same parts.

TRIES = 10  # of a random rectangle; the first that lies within the image counts
_AREA, _RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # of a random crop, as everybody has them since Inception


def centre_box(height: int, width: int, size: Size | None, share: float) -> np.ndarray:
    """The largest centred box of the shape of `size`, times `share`: 0.875 is to resize to 256 and to crop 224."""
    if size is None:
        return np.array([[0.0, 0.0, width, height]])
    scale = min(height / size[0], width / size[1]) * share
    y, x = size[0] * scale / 2, size[1] * scale / 2
    return np.array([[width / 2 - x, height / 2 - y, width / 2 + x, height / 2 + y]])


def crop_boxes(uniform: np.ndarray, height: int, width: int) -> np.ndarray:
    """A random crop for each row of uniform numbers (N x TRIES x 4)."""
    boxes, found = rectangles(uniform, height, width, _AREA, _RATIO)
    # Where no try fits, which takes a very long image: the centre, as long as a crop may be.
    x = min(width, height * _RATIO[1]) / 2
    y = min(height, width / _RATIO[0]) / 2
    boxes[~found] = (width / 2 - x, height / 2 - y, width / 2 + x, height / 2 + y)
    return boxes


def rectangles(
    uniform: np.ndarray, height: int, width: int, area: tuple[float, float], ratio: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray]:
    """Random rectangles within an image, and which of them were found: the area is uniform, the ratio of the sides
    too, by its logarithm, and each rectangle is the first of its tries that fits."""
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
    """The boxes of a batch (one for all, or one each) brought to a size: linear, and with antialiasing, as Pillow's.

    Both sides are products with a matrix of weights, so a batch with different boxes is still one operation, which
    does the same every time; on a GPU, sampling from a grid would alias.
    """
    height, width = images.shape[-2:]
    to = size or (height, width)
    if to == (height, width) and np.array_equal(boxes, [[0.0, 0.0, width, height]]):
        return images
    left, top, right, bottom = torch.from_numpy(boxes.astype(np.float32)).to(images.device, non_blocking=True).T
    rows, columns = _weights(top, bottom, height, to[0]), _weights(left, right, width, to[1])
    with torch.autocast(images.device.type, enabled=False):  # the caller's is for the model: bfloat16 has 8 bits
        seen = rows[:, None] @ images.float() @ columns[:, None].mT
    return seen.round_().clamp_(0, 255).to(torch.uint8) if images.dtype == torch.uint8 else seen.to(images.dtype)


def _weights(start: Tensor, end: Tensor, inputs: int, outputs: int) -> Tensor:
    """What each input is worth to each output: N x outputs x inputs."""
    scale = ((end - start) / outputs)[:, None, None]
    places = torch.arange(max(inputs, outputs), device=start.device) + 0.5
    centres = start[:, None, None] + places[:outputs, None] * scale
    weights = (1 - (places[:inputs] - centres).abs() / scale.clamp(min=1.0)).clamp(min=0.0)
    return weights / weights.sum(dim=2, keepdim=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Held:
    """N x C x H x W, uint8 (0..255) or float. `share` of the centre is seen where no random part is asked for."""

    pixels: Tensor
    share: float = 1.0
    _copies: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.pixels)

    def subset(self, indices: Sequence[int]) -> Held:
        return Held(pixels=self.pixels[torch.tensor(indices, dtype=torch.int64)], share=self.share)

    def settle(self, size: Size | None, *, cropped: bool) -> Held:
        return self

    def read(self, requests: Iterable[Request], size: Size | None, device: torch.device) -> Iterator[Tensor]:
        pixels = self._on(device)
        height, width = pixels.shape[-2:]
        for request in requests:
            images = pixels[torch.from_numpy(request.indices).to(device, non_blocking=True)]
            if request.crop is None:
                boxes = centre_box(height, width, size, self.share)
            else:
                boxes = crop_boxes(request.crop, height, width)
            yield resample(images, boxes, size)

    def _on(self, device: torch.device) -> Tensor:
        """Moved once per device, so that a step moves only its indices."""
        if device not in self._copies:
            self._copies[device] = self.pixels.to(device)
        return self._copies[device]
