"""Try tiles for the depthwise kernels of depthfold.kernels on a GPU, by the shapes of MobileNetV2 at batch 512.

    python -m experiments.step_h200.kernel_tiles

Kernels are compiled first, in several processes, and then timed one after the other. The table has the fastest tile of
each kernel first, for maps with many pixels and with few; it belongs into src/depthfold/kernels/tiles.py. With OUT set,
all times are also in $OUT/tiles.json.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import torch

from depthfold.kernels import tiles
from depthfold.kernels.convolution import Before, Depthwise, _depthwise_backward, _depthwise_forward
from experiments.step_h200.kernels import BATCH, DEPTHWISE, DEVICE, environment, in_processes, milliseconds

KERNELS = ("DEPTHWISE_FORWARD", "DEPTHWISE_BACKWARD")
# Strip, strips, elements and warps. The number of launched warps needs no compilation.
SHAPES = (
    (4, 8, 256, 4), (2, 8, 256, 4), (2, 16, 256, 4), (2, 8, 512, 4), (4, 8, 512, 8), (4, 4, 128, 2), (1, 16, 512, 4)
)  # fmt: skip
LAUNCHED = (2112, 3168, 6336)
Job = tuple[str, tiles.DepthwiseTile]


def work(kernel: str, channels: int, size: int, stride: int) -> Callable[[], Any]:
    """Return a function that launches the kernel."""
    conv = Depthwise(stride, (1, 1), (1, 1))
    x = torch.randn(BATCH, size, size, channels, device=DEVICE).to(torch.bfloat16).permute(0, 3, 1, 2)
    weight = torch.randn(channels, 1, 3, 3, device=DEVICE).to(torch.bfloat16)
    before = Before(torch.rand(4, channels, device=DEVICE), 6.0)
    if kernel == "DEPTHWISE_FORWARD":
        return lambda: _depthwise_forward(x, weight, before, conv, torch.zeros(channels, device=DEVICE))
    dy = _depthwise_forward(x, weight, before, conv, None)[0]
    return lambda: _depthwise_backward(x, weight, dy, before, conv)


def time_tile(job: Job, *, compile_only: bool = False) -> dict[str, Any]:
    """Return the milliseconds per step that the kernel takes with this tile, by shape."""
    kernel, tile = job
    setattr(tiles, kernel, (tile, tile))
    times: dict[tuple[int, ...], float] = {}
    for *shape, uses in DEPTHWISE:
        run = work(kernel, *shape)
        run()
        if not compile_only:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            times[tuple(shape)] = uses * milliseconds(graph.replay, repeat=5, group=2)
    many = {
        shape for shape in times if BATCH * (shape[1] // (shape[2] if "FORWARD" in kernel else 1)) ** 2 >= tiles.LARGE
    }
    totals = {"many": sum(ms for s, ms in times.items() if s in many)}
    totals["few"] = sum(times.values()) - totals["many"]
    return {"kernel": kernel, "tile": astuple(tile), **totals, "ms": {str(shape): ms for shape, ms in times.items()}}


def main() -> None:
    started = time.perf_counter()
    to_compile = [(kernel, tiles.DepthwiseTile(*shape, LAUNCHED[0])) for kernel in KERNELS for shape in SHAPES]
    list(in_processes(partial(time_tile, compile_only=True), to_compile))
    print(f"compiled after {time.perf_counter() - started:.0f} s", flush=True)
    rows = []
    for kernel, shape, launched in itertools.product(KERNELS, SHAPES, LAUNCHED):
        rows.append(time_tile((kernel, tiles.DepthwiseTile(*shape, launched))))
        if "OUT" in os.environ:
            Path(os.environ["OUT"], "tiles.json").write_text(json.dumps([environment(), *rows], indent=1))
    for kernel, pixels in itertools.product(KERNELS, ("many", "few")):
        print(f"\n{kernel}, {pixels} pixels: ms per step, tile, ms by shape")
        for row in sorted((row for row in rows if row["kernel"] == kernel), key=lambda row: row[pixels])[:6]:
            print(f"{row[pixels]:.3f} {row['tile']}", *(f"{ms:.3f}" for ms in row["ms"].values()))


if __name__ == "__main__":
    main()
