"""Preprocessing: how an image becomes an input of the network, for those who run the network elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from depthfold.tasks.source import MeanStd, Size


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocessing:
    """The conversion of an image to an input of the network, and the meaning of the outputs.

    An image has `channels` channels. It is cropped around its centre (`crop_ratio` is the part of the shorter side that
    is kept), resized to `size` (height, width), and normalised to (x - mean) / deviation for each channel, where x is
    from 0 to 1 if `uint8` is true. Output number n is the score of `classes[n]`.
    """

    channels: int
    size: Size
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    classes: tuple[str, ...]
    crop_ratio: float = 1.0
    uint8: bool = True

    @property
    def mean_std(self) -> MeanStd:
        return self.mean, self.deviation

    @property
    def formula(self) -> str:
        """How a pixel x of the task becomes an input. The task does not know how float images were made."""
        return (
            "(x / 255 - mean) / deviation" if self.uint8 else "(x - mean) / deviation, x as in the task's float images"
        )

    def __str__(self) -> str:
        height, width = self.size
        mean, deviation = (", ".join(f"{value:.4g}" for value in values) for values in self.mean_std)
        crop = f", after a centre crop of {self.crop_ratio:g}" if self.crop_ratio != 1 else ""
        return f"{self.channels} x {height} x {width}{crop}; {self.formula} with mean {mean} and deviation {deviation}"
