"""Pictures in memory: on the device they are used on, as they are, and read there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from depthfold.training.data.collection import Request, Size
from depthfold.training.data.geometry import centre_box, crop_boxes, resample


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
