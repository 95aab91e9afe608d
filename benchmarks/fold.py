"""Measure how long trace, rewrite and merge take, for whole networks and per layer as networks get deeper.

    python benchmarks/fold.py

Times are wall-clock seconds of one run each, after an unmeasured run of a small network. `merge` includes `verify`,
which is also shown separately. The column "plan" says what was merged.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import nn

import depthfold as df
from depthfold.support.text import text_table
from depthfold.testing import Block, Conv, NetworkSpec, SmallCNN, random_plan
from depthfold.vision import import_torchvision

HEADER = ("network", "layers", "plan", "segments", "trace", "rewrite", "merge", "of it verify", "total", "ms per layer")


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = function()
    return time.perf_counter() - started, result


def blocks(network: df.Network) -> df.Plan:
    """Return the plan that merges each residual block into one convolution, with an activation at its end."""
    inside = {p for skip in network.skips for p in range(skip.source + 1, skip.target)}
    cuts = [p for p in range(1, network.depth) if p not in inside]
    return df.Plan(cuts, cuts)


def row(name: str, model: nn.Module, size: tuple[int, ...], choose: str) -> tuple[str, ...]:
    x = torch.randn(1, *size)
    t_trace, traced = timed(lambda: df.trace(model, x))
    plans = {
        "nothing merged": lambda: traced.vanilla,
        "every block": lambda: blocks(traced.network),
        "random": lambda: random_plan(traced.network, Random(0), "paper"),
    }
    plan = plans[choose]()
    t_rewrite, student = timed(lambda: df.rewrite(traced, plan))
    t_merge, shallow = timed(lambda: df.merge(student))
    t_verify, _ = timed(lambda: df.verify(student, shallow))
    total = t_trace + t_rewrite + t_merge
    seconds = [f"{t:.2f} s" for t in (t_trace, t_rewrite, t_merge, t_verify, total)]
    segments = str(len(traced.network.segments(plan)))
    return (name, str(traced.depth), choose, segments, *seconds, f"{1000 * total / traced.depth:.1f}")


def chain(depth: int) -> nn.Module:
    """Return a chain of residual blocks of two 3x3 convolutions with this many layers."""
    flat = dict(stride=(1, 1), padding=((1, 1), (1, 1)), dilation=(1, 1))
    conv = Conv(out=16, kernel=(3, 3), **flat)
    last = Conv(out=16, kernel=(3, 3), activation=None, **flat)
    block = Block(items=(conv, last), skip="identity", activation="module")
    return SmallCNN(NetworkSpec(channels=16, size=(32, 32), parts=(block,) * (depth // 2)))


def main() -> None:
    models = import_torchvision().models
    row("warm-up", chain(8), (16, 32, 32), "every block")
    rows = [
        row(name, getattr(models, name)(), (3, 224, 224), choose)
        for name in ("mobilenet_v2", "resnet152")
        for choose in ("nothing merged", "random", "every block")
    ]
    rows += [row("chain of blocks", chain(depth), (16, 32, 32), "every block") for depth in (50, 100, 200, 400)]
    print(
        f"PyTorch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    )
    print("\n".join(text_table(HEADER, rows)))


if __name__ == "__main__":
    main()
