"""The tiles of the kernels, and how a map is divided among programs.

Each kernel has two tiles: for maps with many pixels and for maps with few. experiments/step_h200/kernel_tiles.py
compares tiles of the depthwise kernels on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

LARGE = 65536  # pixels of a batch from which a map has many
PROGRAMS = 1056  # eight for each of the 132 multiprocessors of an H200
MOST_PROGRAMS = 2048  # programs whose sums one program adds up


@dataclass(frozen=True, slots=True)
class NormTile:
    elements: int
    warps: int
    channels: int


@dataclass(frozen=True, slots=True)
class DepthwiseTile:
    """`strip` pixels times a tile of strips and channels. `launched` warps should be launched in total."""

    strip: int
    strips: int
    elements: int
    warps: int
    launched: int


@dataclass(frozen=True, slots=True)
class PointwiseTile:
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    @property
    def launch(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}


NORM = (NormTile(4096, 8, 128), NormTile(2048, 4, 128))
DEPTHWISE_FORWARD = (DepthwiseTile(4, 8, 256, 4, 6336), DepthwiseTile(4, 8, 256, 4, 6336))
DEPTHWISE_BACKWARD = (DepthwiseTile(4, 8, 256, 4, 3168), DepthwiseTile(4, 8, 256, 4, 3168))
POINTWISE_FORWARD = (PointwiseTile(64, 64, 64, 4, 3), PointwiseTile(64, 128, 32, 4, 3))
POINTWISE_BACKWARD = (PointwiseTile(64, 32, 0, 4, 3), PointwiseTile(64, 32, 0, 4, 3))


def channels_block(channels: int, most: int) -> int:
    """Return how many channels a tile has: all of them if they fit, or else whole 128-byte lines if possible."""
    whole = max(16, triton.next_power_of_2(channels))
    if whole <= most:
        return int(whole)
    sizes = [size for size in (256, 128, 64, 32, 16) if size <= most]
    for size in sizes:
        if channels % size == 0 and size >= 64:
            return size
    wasted = {size: ceil(channels, size) * size / channels for size in sizes}
    best = sizes[0]
    for size in sizes[1:]:
        if wasted[size] < wasted[best] - 0.05:
            best = size
    return best


def divide_rows(pixels: int, tile: int, blocks: int, programs: int = PROGRAMS) -> tuple[int, int]:
    """Return the pixels of each program, a multiple of the tile, and the number of programs."""
    number = max(1, min(programs // blocks, ceil(pixels, tile)))
    rows = ceil(ceil(pixels, number), tile) * tile
    return rows, ceil(pixels, rows)


@dataclass(frozen=True, slots=True)
class DepthwiseGrid:
    """The programs of a depthwise kernel: `across` tiles in a row, and `images` images for each program."""

    strip: int
    block_w: int
    block_c: int
    across: int
    images: int
    programs: int
    warps: int

    @property
    def launch(self) -> dict[str, int]:
        return {"STRIP": self.strip, "BLOCK_W": self.block_w, "BLOCK_C": self.block_c, "num_warps": self.warps}


def depthwise_grid(tile: DepthwiseTile, columns: int, channels: int, batch: int, stride: int = 1) -> DepthwiseGrid:
    """Divide a batch of maps with this many columns."""
    strip = max(tile.strip, stride)
    strips = ceil(columns, strip)
    block_w = min(tile.strips, int(triton.next_power_of_2(strips)))
    while block_w > 1 and ceil(strips, block_w) * block_w >= 1.3 * strips:
        block_w //= 2
    block_c = channels_block(channels, max(16, tile.elements // block_w))
    warps = max(1, min(tile.warps, block_w * block_c // 64))
    across = ceil(strips, block_w)
    images = max(1, batch * across * ceil(channels, block_c) * warps // tile.launched)
    images = max(images, ceil(batch * across, MOST_PROGRAMS))
    while ceil(batch, images) * across > MOST_PROGRAMS:
        images += 1
    images = min(images, batch)
    return DepthwiseGrid(strip, block_w, block_c, across, images, ceil(batch, images) * across, warps)


def ceil(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def pixels_and_channels(x: Tensor) -> tuple[int, int]:
    n, c, h, w = x.shape
    return n * h * w, c


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def empty(like: Tensor, *shape: int) -> Tensor:
    """Return an uninitialised tensor in float32."""
    return torch.empty(shape, device=like.device, dtype=torch.float32)
