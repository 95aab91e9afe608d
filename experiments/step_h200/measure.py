"""Measure training steps per second on one GPU, eager and captured in a CUDA graph, in the same run.

    python -m experiments.step_h200.measure OUT.json [--networks mobilenet_v2 vgg19_bn] [--batch 512] [--steps 200]
    python -m experiments.step_h200.measure OUT.json --networks efficientnet_lite0 --batch 128 --images 2000

MobileNetV2-1.0 for 32x32 images (stem and second stage without stride) and VGG19-BN (one linear layer after its
convolutions), in bfloat16, channels last, with padded crop and flip, with and without a teacher of the same
architecture. EfficientNet-Lite0 for 224x224 images has 5x5 depthwise convolutions, and padding is a layer of its own.
The images are random, by default in the number of CIFAR-10's training set. The steps are those of
`depthfold.training.train`, including their batches. train() reads the losses every 50 steps, and so waits for the
device. The time of a step is the median over the windows of 50 steps after the first one. "Host" is the time until the
host has queued a step, which is hidden if it is shorter. "Ready" is the time of the first window in excess of 50 steps,
which contains the capture. Two short training runs before the first row of a network start the libraries.

A dry run on a CPU: --device cpu --batch 2 --images 40 --window 1 --steps 5 --precision float32 --seconds 600
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import time
from pathlib import Path
from statistics import median

import torch

import depthfold as df
from depthfold.backends.pytorch import PyTorch
from depthfold.tasks import ClassificationTask
from depthfold.training import Recipe, train
from experiments.cifar_networks import mobilenet_v2, vgg19_bn
from experiments.subjects import efficientnet_lite0

NETWORKS = {"mobilenet_v2": mobilenet_v2, "vgg19_bn": vgg19_bn, "efficientnet_lite0": efficientnet_lite0}
SIZES = {"efficientnet_lite0": 224}  # of images, otherwise 32


def random_images(number: int, size: int) -> ClassificationTask:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (number, 3, size, size), dtype=torch.uint8, generator=generator)
    return ClassificationTask.tensors(train=(images, torch.arange(number) % 10), holdout=0)


class Clock:
    """The progress of a training run: the time after every step."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def __call__(self, what: str, total: int, done: int):
        return lambda: self.times.append(time.perf_counter())

    def windows(self, steps: int) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.times[::steps])]

    def host(self, steps: int) -> float:
        """Return the time until the host has queued a step: half of the steps of the last window, without its end."""
        start, half = len(self.times) - 1 - steps, max(1, steps // 2)
        return (self.times[start + half] - self.times[start]) / half


def measure(
    traced: df.TracedNetwork, task: ClassificationTask, recipe: Recipe, options, *, taught: bool, capture: bool
):
    """Train once and return a row of the results."""
    student = df.rewrite(traced, traced.vanilla)
    teacher = copy.deepcopy(student) if taught else None
    cuda, clock = options.device != "cpu", Clock()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    result = train(
        student, task, recipe, teacher=teacher, split=None, device=options.device, progress=clock, capture=capture
    )
    first, *windows = clock.windows(options.window)
    step = median(windows) / options.window
    return {
        "teacher": taught,
        "execution": result.execution,
        "steps per second": 1 / step,
        "ms per step": 1000 * step,
        "ms per step, by window": [1000 * window / options.window for window in windows],
        "host, ms per step": 1000 * clock.host(options.window),
        "ready, s": first - options.window * step,
        "peak memory, GB": torch.cuda.max_memory_allocated() / 1e9 if cuda else None,
        "loss": result.loss,
    }


def print_table(rows: list[dict]) -> None:
    print("| network | teacher | execution | steps/s | ms | times eager | host, ms | ready, s | peak, GB | loss |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        same = [each for each in rows if (each["network"], each["teacher"]) == (row["network"], row["teacher"])]
        times = row["steps per second"] / same[0]["steps per second"]
        memory = "" if row["peak memory, GB"] is None else f"{row['peak memory, GB']:.1f}"
        print(
            f"| {row['network']} | {'yes' if row['teacher'] else 'no'} | {row['execution']} "
            f"| {row['steps per second']:.1f} | {row['ms per step']:.2f} | {times:.2f} "
            f"| {row['host, ms per step']:.2f} | {row['ready, s']:.2f} "
            f"| {memory} | {row['loss']:.4f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=["mobilenet_v2", "vgg19_bn"])
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--window", type=int, default=50, help="steps between two readings; on a GPU, a multiple of 50")
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--seconds", type=float, default=60, help="start no measurement after so many seconds of them")
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args()
    started, spent = time.perf_counter(), 0.0
    device = "cpu" if options.device == "cpu" else "cuda"
    environment = PyTorch(device=device).environment((torch.empty(1, 3, 32, 32),))
    print(environment)
    recipe = Recipe(
        steps=options.steps,
        batch=options.batch,
        lr=0.01,
        crop="pad",
        flip=True,
        precision=options.precision,
        channels_last=True,
    )
    rows, left_out = [], []
    for name in options.networks:
        size = SIZES.get(name, 32)
        traced, task = df.trace(NETWORKS[name](), torch.randn(1, 3, size, size)), random_images(options.images, size)
        # Start the libraries and compile the kernels. Captured first: PyTorch keeps the algorithm that cuDNN has chosen
        # for a shape, also for eager steps.
        for capture in (True, False):
            train(
                df.rewrite(traced, traced.vanilla), task, recipe.replace(steps=4), split=None, device=options.device,
                capture=capture,
            )  # fmt: skip
        for taught in (False, True):
            for capture in (False, True):
                if spent > options.seconds:
                    left_out.append({"network": name, "teacher": taught, "capture": capture})
                    continue
                begun = time.perf_counter()
                row = measure(traced, task, recipe, options, taught=taught, capture=capture)
                spent += time.perf_counter() - begun
                rows.append({"network": name} | row)
                print(json.dumps(rows[-1]), flush=True)
                found = {"environment": environment.to_json(), "recipe": recipe.to_json(), "rows": rows}
                options.out.write_text(json.dumps(found | {"left out": left_out}, indent=1))
    print_table(rows)
    print(f"{time.perf_counter() - started:.0f} s in all; left out: {left_out or 'nothing'}")


if __name__ == "__main__":
    main()
