"""Compare the moves at equal latency on one GPU: MobileNetV2-1.0 and ResNet-56 on CIFAR-10.

    python experiments/moves_gpu.py latency CIFAR10 RUN WEIGHTS --network mobilenet_v2
    python experiments/moves_gpu.py importance CIFAR10 RUN WEIGHTS --network mobilenet_v2
    python experiments/moves_gpu.py plans CIFAR10 RUN WEIGHTS --network mobilenet_v2
    python experiments/moves_compare.py RUN ...                     # the figures of the page

WEIGHTS are experiments/importance-methods/base.safetensors for mobilenet_v2, and the file resnet56-4bfd9763.th of
github.com/akamaster/pytorch_resnet_cifar10 for resnet56. RUN keeps journals: a command that is stopped resumes there.

Both tables are measured once, with all moves. Three searches use them: "paper" removes activations and merges; "all
moves" also drops layers and residual branches; "LayerMerge's rule" drops layers, but merges every block into one
convolution, and a block of several layers ends in an activation. Every plan is fine-tuned alike, and its merged network
is timed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_runs import FINETUNING, ON_CARD, executor, finetune, record, rows, short
from subjects import STOPWATCHES, SUBJECTS, timed_batch

import depthfold as df
from depthfold.baselines import layermerge_frontier
from depthfold.core import Network
from depthfold.importance import measure_importance
from depthfold.tracing import TracedNetwork
from depthfold.training import preset

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from latency import end_to_end

ALL = ("merge", "drop-layers", "drop-branches")
RULES = ("paper", "LayerMerge's rule", "all moves")
SHARES = {"mobilenet_v2": (0.65, 0.5, 0.35, 0.25), "resnet56": (0.8, 0.65, 0.5, 0.35)}  # of the original's latency
SEEDS = (0, 1)


def main() -> None:
    options = _arguments()
    options.run.mkdir(parents=True, exist_ok=True)
    if options.device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    subject = SUBJECTS[options.network]
    model = subject.load(options.weights)
    traced, timed = (subject.trace(model, batch) for batch in (1, timed_batch(options.device)))
    work = {"latency": latency, "importance": importance, "plans": plans}[options.what]
    work(traced, timed, subject.task(options.data), options)


def latency(traced: TracedNetwork, timed: TracedNetwork, task: df.ClassificationTask, options: Any) -> None:
    """Measure the latency table with all moves, if it is not there yet."""
    _table(options, "latency", lambda: df.measure_latency(
        timed, STOPWATCHES[options.device], moves=ALL, run=options.run / "latency"
    ))  # fmt: skip


def importance(traced: TracedNetwork, timed: TracedNetwork, task: df.ClassificationTask, options: Any) -> None:
    """Measure the importance table with all moves, if it is not there yet."""
    recipe = preset("brief")
    recipe = short(recipe.replace(**(ON_CARD | {"batch": recipe.batch})), options)
    # Without latency=, which leaves out entries that LayerMerge's rule may need.
    _table(options, "importance", lambda: measure_importance(
        traced, task, recipe, method="brief", moves=ALL, executor=executor(options), run=options.run / "brief"
    ))  # fmt: skip


def plans(traced: TracedNetwork, timed: TracedNetwork, task: df.ClassificationTask, options: Any) -> None:
    """Fine-tune the plan of each search at each latency in the same way, score it, and time its merged network."""
    times = df.LatencyTable.loads((options.run / "latency.json").read_text())
    costs = df.ImportanceTable.loads((options.run / "importance.json").read_text())
    (original,) = end_to_end(timed, STOPWATCHES[options.device], [timed.vanilla])
    found: dict[tuple[str, float], Any] = {}
    for rule in RULES:
        frontier = solve_by(rule, times, costs, traced.network)
        for share in SHARES[options.network]:
            fastest = frontier.points[0].latency / frontier.original
            found[rule, share] = frontier.at(f"{share:.0%}") if fastest <= share else None
            if found[rule, share] is None:
                print(f"{rule}: no plan at {share:.0%}, the fastest takes {fastest:.0%}")
    known: dict[tuple[str, int], dict[str, Any]] = {}
    for seed in SEEDS:
        for (rule, share), solved in found.items():
            key = f"{rule} {share} {seed}"
            if solved is None or key in rows(options.run):
                continue
            text = str(solved.plan)
            if (text, seed) not in known:
                row = finetune(traced, task, solved.plan, short(FINETUNING.replace(seed=seed), options), options.device)
                (measured,) = end_to_end(timed, STOPWATCHES[options.device], [solved.plan])
                known[text, seed] = row | {"measured": measured}
            place = {"rule": rule, "share": share, "seed": seed, "plan": text, "original": original}
            record(options.run, key, known[text, seed] | place | {"predicted": solved.latency})


def solve_by(rule: str, times: df.LatencyTable, costs: df.ImportanceTable, network: Network) -> df.Frontier:
    """Solve with the entries that a search may use."""
    if rule == "all moves":
        return df.solve(times, costs, network=network)
    if rule == "paper":
        merged = tuple(entry for entry in times.entries if entry.shape is None)
        kept = tuple(entry for entry in costs.entries if not entry.dropped)
        return df.solve(replace(times, entries=merged), replace(costs, entries=kept), network=network)
    # With the same importances as the other rules, so that only the moves differ.
    return layermerge_frontier(times, costs, network, exponential=False)


def _table(options: argparse.Namespace, name: str, measure: Callable[[], Any]) -> None:
    """Measure a table and keep it in the run, if it is not there."""
    file = options.run / f"{name}.json"
    if not file.exists():
        started = time.perf_counter()
        table = measure()
        file.write_text(table.dumps())
        record(options.run, name, {"seconds": time.perf_counter() - started, "entries": len(table.entries)})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("latency", "importance", "plans"))
    parser.add_argument("data", type=Path, help="CIFAR-10 in its binary layout")
    parser.add_argument("run", type=Path)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--network", choices=tuple(SHARES), required=True)
    parser.add_argument("--workers", type=int, default=8, help="processes that share the GPU; 0: this process")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, help="at most so many steps of batch 8, for a dry run")
    return parser.parse_args()


if __name__ == "__main__":
    main()
