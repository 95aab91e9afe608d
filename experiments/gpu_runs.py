"""Shared by experiments on one GPU: how plans are fine-tuned, and where results are kept."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

import depthfold as df
from depthfold.jobs import Executor, InProcess, Processes
from depthfold.tracing import TracedNetwork, free_weights
from depthfold.training import Recipe, train

ON_CARD: dict[str, Any] = {"precision": "bfloat16", "channels_last": True, "crop": "pad", "flip": True, "batch": 512}
FINETUNING = Recipe(
    epochs=12, lr=0.1, weight_decay=5e-4, warmup=87, clip=5.0, distillation=0.5, temperature=2.0, **ON_CARD
)
PLANS = Recipe(epochs=5, lr=0.05, clip=5.0, distillation=0.9, temperature=2.0, **ON_CARD)  # for fit_surrogate


def finetune(
    traced: TracedNetwork, task: df.ClassificationTask, plan: df.Plan, recipe: Recipe, device: str
) -> dict[str, Any]:
    """Fine-tune a plan with the original as its teacher, and return its scores."""
    student, teacher = df.rewrite(traced, plan), df.rewrite(traced, traced.vanilla).eval()
    row = train_and_score(student, teacher, task, recipe, device)
    free_weights(student, teacher)
    return row


def train_and_score(
    student: nn.Module, teacher: nn.Module | None, task: df.ClassificationTask, recipe: Recipe, device: str
) -> dict[str, Any]:
    """Train a network, and return its scores on the hold-out and the test set."""
    result = train(student, task, recipe, teacher=teacher, device=device)
    test = task.score(student.eval(), "test")
    return {"holdout": result.score, "test": test, "seconds": result.seconds, "recipe": recipe.to_json()}


def executor(options: argparse.Namespace) -> Executor:
    """Return an executor for the device and number of workers of the command line."""
    if options.workers == 0:
        return InProcess()
    if options.device == "cpu":
        return Processes(workers=options.workers)
    return Processes(devices=("cuda:0",), workers_per_device=options.workers)


def short(recipe: Recipe, options: argparse.Namespace) -> Recipe:
    """Return the recipe, or for a dry run on the CPU a shorter one."""
    if options.steps is None:
        return recipe
    return recipe.replace(
        steps=min(options.steps, recipe.steps or options.steps), batch=8, warmup=0, precision="float32"
    )


def record(run: Path, key: str, row: dict[str, Any]) -> None:
    """Append a line to the results of a run, and print its figures."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    known = {"torch": torch.__version__, **_versions(), "date": datetime.date.today().isoformat()}
    row = {**row, "key": key, "device": device, **known}
    with (run / "results.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps({k: v for k, v in row.items() if k not in ("recipe", "plan")}), flush=True)


def _versions() -> dict[str, str]:
    """Return the versions of the libraries that train and prune, as far as they are installed as packages."""
    found = {}
    for package in ("torchvision", "torch-pruning", "triton"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def rows(run: Path) -> dict[str, dict[str, Any]]:
    """Return the results of a run. Of lines with the same key, the last one counts."""
    file = run / "results.jsonl"
    rows = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return {row["key"]: row for row in rows}


def forget(run: Path, keys: Collection[str]) -> None:
    """Remove results. No other process may write any at the same time."""
    kept = [json.dumps(row) for key, row in rows(run).items() if key not in keys]
    new = run / "results.jsonl.new"
    new.write_text("".join(f"{line}\n" for line in kept))
    new.replace(run / "results.jsonl")
