"""Compare the methods of importance on this machine: cost, and rank correlation with "trained". Run by importance.py

A small MobileNetV2 is first trained on the part of Fashion-MNIST that ships with the demo, at 16x16. Then the blocks of
several layers are measured with every method, in this process: "trained" for one epoch and with two seeds, the others
with their presets, but all with the same batch. "s per block" includes rewriting the network and scoring it on the
hold-out images. Importances are in points of accuracy for "trained" and "brief"; those of the others are minus a
divergence of outputs. The row "trained, seed 1" shows how well the reference agrees with itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from statistics import median

import torch
from scipy.stats import spearmanr
from torch import nn

import depthfold as df
from depthfold.core import BlockOption, FlaggedSpan
from depthfold.demo.demo import SHIPPED
from depthfold.importance import Method
from depthfold.importance.entry import EntrySetup, make_groups
from depthfold.support.text import text_table
from depthfold.tasks import ClassificationTask
from depthfold.tracing import TracedNetwork
from depthfold.training import Recipe, preset, train

BATCH = 64
EPOCHS = 3  # of the network itself
TRAINED = Recipe(epochs=1, batch=BATCH, lr=0.05, clip=5.0)
HEADER = ("method", "s per block", "of trained", "Spearman with trained, seed 0", "median importance")


def compare_methods(model: nn.Module, most: int) -> None:
    """Print the table of all methods, measured on at most `most` blocks."""
    torch.manual_seed(0)
    task = ClassificationTask.fashion_mnist(SHIPPED, size=16)
    started = time.perf_counter()
    score = train(model, task, Recipe(epochs=EPOCHS, batch=BATCH, lr=0.1, weight_decay=1e-4)).score
    traced = df.trace(model.eval(), task.example(), ignore=["0.0"])
    blocks = [block for block in traced.flagged_spans() if len(block.span) > 1]
    order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(0)).tolist()
    chosen = [blocks[n] for n in sorted(order[:most])]
    print(f"A network of {traced.depth} layers, trained in {time.perf_counter() - started:.0f} s to {score:.1f}% of "
          f"{task.count('holdout')} hold-out images")  # fmt: skip
    print(f"{len(chosen)} of {len(blocks)} blocks, drawn at random; {torch.get_num_threads()} threads\n", flush=True)
    found = {}
    for name, method, seed in _cases():
        found[name] = measure(traced, task, method, chosen, seed)
        print(f"  {name}: {found[name][2]:.0f} s", flush=True)
    print("", *text_table(HEADER, list(_rows(found))), sep="\n")


def _rows(found: dict[str, tuple[float, list[float], float]]) -> Iterator[tuple[str, ...]]:
    (_, reference, first), (_, _, second), *_ = found.values()
    for name, (base, scores, seconds) in found.items():
        agrees = "" if scores is reference else f"{spearmanr(reference, scores).statistic:.3f}"
        ratio = seconds / ((first + second) / 2)
        yield name, f"{seconds / len(scores):.2f}", f"{ratio:.3f}", agrees, f"{median(scores) - base:+.2f}"


def _cases() -> list[tuple[str, Method, int]]:
    trained = Method.of("trained", TRAINED, reinit=False)
    cheap = ("brief", "recalibrated", "local", "fit")
    return [
        ("trained, seed 0", trained, 0),
        ("trained, seed 1", trained, 1),
        *((name, Method.of(name, preset(name).replace(batch=BATCH)), 0) for name in cheap),
    ]


def measure(
    traced: TracedNetwork, task: ClassificationTask, method: Method, blocks: Sequence[FlaggedSpan], seed: int
) -> tuple[float, list[float], float]:
    """Return the score of the original, those of the blocks, and the seconds that all blocks took."""
    work = EntrySetup(traced, task, method)()
    base = work(seed)["score"]
    options = [BlockOption(block) for block in blocks]
    started = time.perf_counter()
    if method.groups_blocks:
        results = [result for job in make_groups(options, seed) for result in work(job.payload)]
    else:
        results = [work((option, seed)) for option in options]
    return base, [result["score"] for result in results], time.perf_counter() - started
