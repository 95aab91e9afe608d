"""Compare the methods of importance, and measure the overhead of its trainings. Run: make bench-importance

The first part compares the methods: see methods.py.

The second part measures the overhead, and the gain from a second worker. A small MobileNetV2 is trained briefly for
every block, on random images of 32x32. The table is measured three times: in this process, with one worker process and
with two, each with one thread. "In training" is the sum of the seconds that the trainings took, including their scores,
according to the journal. "Overhead" is the wall-clock time divided by that sum, or by half of it for two workers. The
wall-clock time includes everything: starting the workers, which import torch twice (a separate worker scores the
original before the others start), sending them the network, rewriting it for every block, and the journal. All three
tables must be identical to the last bit.

Run it on a machine with at least two cores that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from pathlib import Path

import torch
from methods import compare_methods
from torch import nn

import depthfold as df
from depthfold.importance import measure_importance
from depthfold.jobs import Executor, InProcess, Processes
from depthfold.support.text import text_table
from depthfold.tasks import ClassificationTask
from depthfold.tracing import TracedNetwork
from depthfold.training import Recipe

OVERHEAD, THROUGHPUT = 1.15, 1.6  # at most, and at least
HEADER = ("executor", "clock, s", "in training, s", "overhead", "until the first score, s", "trainings per minute")


class Block(nn.Module):
    """An inverted residual: a 1x1 expansion, a depth-wise 3x3 convolution and a 1x1 projection."""

    def __init__(self, ins: int, outs: int, stride: int, wider: int = 4) -> None:
        super().__init__()
        inner = ins * wider
        self.residual = stride == 1 and ins == outs
        self.body = nn.Sequential(
            *(nn.Conv2d(ins, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU6()),
            *(nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False), nn.BatchNorm2d(inner), nn.ReLU6()),
            *(nn.Conv2d(inner, outs, 1, bias=False), nn.BatchNorm2d(outs)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x) if self.residual else self.body(x)


def small_mobilenet(channels: int) -> nn.Module:
    torch.manual_seed(0)
    blocks = (Block(8, 8, 1), Block(8, 16, 2), Block(16, 16, 1), Block(16, 24, 2), Block(24, 24, 1))
    stem = nn.Sequential(nn.Conv2d(channels, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10))
    return nn.Sequential(stem, *blocks, head)


def network() -> TracedNetwork:
    return df.trace(small_mobilenet(3), torch.zeros(1, 3, 32, 32), ignore=["0.0"])


def made_up_task() -> ClassificationTask:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (2000, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return ClassificationTask.tensors(train=(images, torch.arange(2000) % 10), holdout=20)


def measure(executor: Executor, steps: int) -> tuple[df.ImportanceTable, float, float, float]:
    """Return the table, the wall-clock seconds, the seconds in training, and the seconds until the first score."""
    recipe, first = Recipe(steps=steps, batch=32, lr=0.01, crop="pad", flip=True), 0.0

    def progress(what: str, total: int, done: int) -> object:
        def step() -> None:
            nonlocal first
            first = first or time.perf_counter() - started

        return step

    traced, task = network(), made_up_task()
    with tempfile.TemporaryDirectory() as run:
        started = time.perf_counter()
        table = measure_importance(
            traced, task, recipe, method="trained", executor=executor, run=run, progress=progress
        )
        clock = time.perf_counter() - started
        lines = (Path(run) / "importance.jsonl").read_text().splitlines()[1:]
    return table, clock, sum(json.loads(line)["result"]["seconds"] for line in lines), first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="steps of each training in the measurement of overhead")
    parser.add_argument("--blocks", type=int, default=20, help="blocks in the comparison of methods")
    parser.add_argument("--only", choices=("methods", "overhead"), help="run only this part")
    options = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; Python {platform.python_version()}, "
          f"PyTorch {torch.__version__}, {platform.system()}\n")  # fmt: skip
    if options.only != "overhead":
        compare_methods(small_mobilenet(1), options.blocks)
    if options.only != "methods":
        print()
        measure_overhead(options.steps)


def measure_overhead(steps: int) -> None:
    """Print the overhead of three executors on top of the trainings themselves."""
    cases = {"in this process": (InProcess(), 1)}
    cases |= {f"worker processes: {n}": (Processes(workers=n, threads=1), n) for n in (1, 2)}
    rows, rates, overheads, tables = [], [], [], []
    for name, (executor, workers) in cases.items():
        table, clock, inside, first = measure(executor, steps)
        tables.append(table)
        rates.append(60 * len(table.entries) / clock)
        overheads.append(clock * workers / inside)
        rows.append((name, f"{clock:.1f}", f"{inside:.1f}", f"{overheads[-1]:.3f}", f"{first:.1f}", f"{rates[-1]:.0f}"))
    throughput = rates[2] / rates[1]
    equal = "the same" if all(table == tables[0] for table in tables) else "NOT THE SAME"
    print(f"{len(tables[0].entries)} trainings of {steps} steps; the tables are {equal}\n")
    print("\n".join(text_table(HEADER, rows)))
    print(f"\none worker: {_verdict(overheads[1], 'at most', OVERHEAD, overheads[1] <= OVERHEAD)}")
    print(f"two workers against one: {_verdict(throughput, 'at least', THROUGHPUT, throughput >= THROUGHPUT)}")


def _verdict(found: float, how: str, limit: float, met: bool) -> str:
    return f"{found:.3f} ({how} {limit}: {'met' if met else 'MISSED'})"


if __name__ == "__main__":
    main()
