"""Measure how much accuracy fine-tuning recovers, with and without distillation, on a small real task on a CPU.

    python -m experiments.finetune_fashion_mnist.measure FASHION_MNIST OUT.json

A small residual network is trained on Fashion-MNIST. A plan removes the activation inside every residual block, so that
each block becomes one 5x5 convolution. The student is scored before fine-tuning, then fine-tuned with and without
distillation, with three seeds each, and merged. All scores are accuracies on the test set, in per cent.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import fmean

import torch
from torch import nn

import depthfold as df
from depthfold.backends.pytorch import PyTorch
from depthfold.training import train

SEEDS = (0, 1, 2)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))
        self.two = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.two(torch.relu(self.one(x))))


def down(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU())


def small_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        down(1, 12), Residual(12), Residual(12), down(12, 24), Residual(24), Residual(24),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, nargs=2, default=(1200, 240), help="of base training and fine-tuning")
    options = parser.parse_args()
    task = df.ClassificationTask.fashion_mnist(options.data)
    base = df.Recipe(steps=options.steps[0], batch=64, lr=0.1, weight_decay=5e-4, warmup=50, flip=True)
    tuning = df.Recipe(steps=options.steps[1], batch=64, lr=0.02, weight_decay=5e-4, warmup=20, clip=5.0, flip=True)
    started = time.perf_counter()
    model = small_network()
    train(model, task, base, split=None)
    model.eval()
    traced = df.trace(model, torch.randn(1, 1, 28, 28))
    inner = {skip.source + 1 for skip in traced.network.skips}
    cuts = [l for l in range(1, traced.depth) if l not in inner]
    student = df.rewrite(traced, df.Plan(activations=[*cuts, traced.depth], cuts=cuts))
    scores: dict[str, object] = {
        "original": task.score(model, "test"),
        "student before fine-tuning": task.score(student.eval(), "test"),
    }
    print(json.dumps(scores), flush=True)
    for name, teacher in (("without distillation", None), ("with distillation", model)):
        found = []
        for seed in SEEDS:
            tuned = df.finetune(student, task, tuning.replace(seed=seed), teacher=teacher).eval()
            shallow = df.merge(tuned)
            found.append({"seed": seed, "student": task.score(tuned, "test"), "merged": task.score(shallow, "test")})
            print(name, found[-1], f"{time.perf_counter() - started:.0f} s", flush=True)
        scores[name] = {"runs": found, "mean": fmean(run["merged"] for run in found)}
    environment = PyTorch().environment((torch.empty(64, 1, 28, 28),))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    record = {"environment": environment.to_json(), "base": base.to_json(), "fine-tuning": tuning.to_json()}
    options.out.write_text(json.dumps(record | {"layers": traced.depth, "scores": scores}, indent=1) + "\n")


if __name__ == "__main__":
    main()
