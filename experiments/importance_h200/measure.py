"""Measure entries of the importance table per minute on one GPU, for different numbers of workers that share it.

    python -m experiments.importance_h200.measure CIFAR10 OUT.json [--workers 1 2 4 8] [--entries 12]

MobileNetV2 for 32x32 images (stem and second stage without stride) on CIFAR-10, one epoch per entry at batch 512 in
bfloat16, channels last, padded crop and flip. Each worker trains `entries` entries. The rate is measured from when all
workers are training. Their start-up time is shown separately, because it is paid once per table.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median

import torch

from depthfold.backends.pytorch import PyTorch
from depthfold.core import BlockOption
from depthfold.importance.entry import EntrySetup, make_job
from depthfold.importance.methods import Method
from depthfold.jobs import Processes
from depthfold.tasks import ClassificationTask
from depthfold.training import Recipe
from experiments.cifar_networks import mobilenet_v2, trace_for_cifar


def rate(setup: EntrySetup, workers: int, entries: int, device: str) -> dict[str, object]:
    blocks = [block for block in setup.traced.flagged_spans() if len(block.span) > 1][: workers * entries]
    jobs = [make_job(BlockOption(block), 0) for block in blocks]
    here = Processes(workers=workers) if device == "cpu" else Processes(devices=(device,), workers_per_device=workers)
    started = time.perf_counter()
    finished, seconds, failures = [], [], []
    for outcome in here.run(setup, jobs):
        finished.append(time.perf_counter() - started)
        seconds.append(outcome.seconds)
        if outcome.failure is not None:
            failures.append(str(outcome.failure))
    # By the `workers`-th result, all workers are taken to be training: the rate counts the results after it.
    first, last = finished[workers - 1], finished[-1]
    return {
        "workers": workers,
        "entries": len(jobs),
        "entries per minute": 60 * (len(jobs) - workers) / (last - first),
        "seconds per entry, median": median(seconds),
        "seconds until all had a first result": first,
        "seconds in all": last,
        "failures": failures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="CIFAR-10 in its binary layout")
    parser.add_argument("out", type=Path)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--entries", type=int, default=12)
    parser.add_argument("--batches", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--steps", type=int, default=None, help="instead of one epoch, for a dry run")
    options = parser.parse_args()
    traced = trace_for_cifar(mobilenet_v2())
    task = ClassificationTask.cifar10(options.data)
    device = "cpu" if options.device == "cpu" else "cuda"
    environment = PyTorch(device=device).environment((torch.empty(1, 3, 32, 32),))
    print(environment)
    rows = []
    for batch in options.batches:
        recipe = Recipe(
            epochs=None if options.steps else 1,
            steps=options.steps,
            batch=batch,
            lr=0.1,
            crop="pad",
            flip=True,
            precision=options.precision,
            channels_last=True,
        )
        for workers in options.workers:
            row = {"batch": batch} | rate(
                EntrySetup(traced, task, Method.of("trained", recipe)), workers, options.entries, options.device
            )
            print(json.dumps(row), flush=True)
            rows.append(row)
            found = {"environment": environment.to_json(), "recipe": recipe.to_json(), "rows": rows}
            options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
