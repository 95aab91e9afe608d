"""Compare predicted with measured latencies. Run: make bench-latency, or this file with the names of runtimes.

The network is MobileNetV2-1.0 at 224x224, batch 1, without stem and head, as in the paper. For each runtime:

1. Measure and calibrate the table.
2. Build 20 random plans of all depths and time them end to end. Compare predicted with measured latencies, for blocks
   alone and in context. The first plan has the segments of the original, which the calibration has seen; the others are
   new.
3. Do the same for plans from the solver.
4. Run choose() for five budgets, and measure the chosen plans again, in the same rounds as the original.

The importances are made up: a random loss for each removed activation. Only latency is tested here.
Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from random import Random
from statistics import median

import torch

import depthfold as df
from depthfold.backends import Backend, Compiled, get
from depthfold.core import Score
from depthfold.errors import BudgetError
from depthfold.latency import Timer, choose, measure_latency
from depthfold.latency.blocks import block_shapes
from depthfold.latency.candidates import build_plan, closing_all
from depthfold.latency.timer import Rounds, milliseconds
from depthfold.support.text import text_table
from depthfold.tracing import TracedNetwork
from depthfold.vision import import_torchvision

SOLVED = 10
WHOLE = Timer(rounds=10)
BUDGETS = (0.5, 0.6, 0.7, 0.8, 0.9)
STEM_AND_HEAD = ["features.0", "features.18"]


def mobilenet_v2(width: float = 1.0, batch: int = 1) -> TracedNetwork:
    model = import_torchvision().models.mobilenet_v2(weights=None, width_mult=width)
    return df.trace(model.eval(), torch.randn(batch, 3, 224, 224), ignore=STEM_AND_HEAD)


def random_plans(network: df.Network, count: int, seed: int) -> Iterable[df.Plan]:
    """Yield plans from no merging to long random spans, with activations at random cuts."""
    rng = Random(seed)
    ends: dict[int, list[int]] = {}
    for span in network.spans("paper"):
        ends.setdefault(span.i, []).append(span.j)
    for n in range(count):
        boldness = n / (count - 1)
        position, cuts = 0, []
        while position < network.depth:
            position = rng.choice(ends[position]) if rng.random() < boldness else position + 1
            cuts.append(position)
        yield df.Plan(activations=[cut for cut in cuts if rng.random() < 0.75], cuts=cuts[:-1])


def made_up_importances(network: df.Network, seed: int = 0) -> df.ImportanceTable:
    rng = Random(seed)
    loss = [rng.uniform(0.05, 1.0) for _ in range(network.depth + 1)]
    entries = tuple(
        Score(span=span, samples=(-sum(loss[l] for l in range(span.i + 1, span.j) if l in network.activations),))
        for span in network.flagged_spans()
    )
    return df.ImportanceTable(entries=entries)


def end_to_end(traced: TracedNetwork, backend: Backend, plans: Iterable[df.Plan], timer: Timer = WHOLE) -> list[float]:
    """Return the latencies of whole networks, measured in rounds."""
    compiled: dict[int, Compiled] = {}
    rounds: dict[int, Rounds] = {}
    with closing_all(compiled):
        for n, plan in enumerate(plans):
            compiled[n] = build_plan(traced, backend, plan, traced.example_tensors())
        timer.measure(compiled, rounds)
    return [milliseconds(rounds[n]) for n in compiled]


def prediction(
    traced: TracedNetwork, backend: Backend, tables: dict[str, df.LatencyTable], plans: list[df.Plan]
) -> None:
    measured = end_to_end(traced, backend, plans)
    rows, errors = [], {name: [] for name in tables}
    for plan, latency in zip(plans, measured, strict=True):
        row = [str(len(traced.network.segments(plan))), f"{latency:.2f}"]
        for name, table in tables.items():
            guess = table.predict(traced.network, plan)
            errors[name].append(abs(guess / latency - 1))
            row += [f"{guess:.2f}", f"{guess / latency - 1:+.1%}"]
        rows.append(tuple(row))
    header = ("segments", "measured, ms", *(title for name in tables for title in (f"{name}, ms", "error")))
    print("\n".join(text_table(header, rows)))
    for name, found in errors.items():
        print(f"{name}: error {median(found):.1%} in the median, {max(found):.1%} at worst")


def closed_loop(traced: TracedNetwork, backend: Backend, table: df.LatencyTable, frontier: df.Frontier) -> None:
    rows, refused = [], []
    for share in BUDGETS:
        started = time.perf_counter()
        try:
            plan = choose(traced, frontier, df.Budget.share(share), backend)
        except BudgetError as error:
            rows.append((f"{share:.0%}", "-", "-", "infeasible", ""))
            refused.append(str(error))
            continue
        taken = time.perf_counter() - started
        original, latency = end_to_end(traced, backend, [traced.vanilla, plan.plan])
        verdict = "met" if latency <= share * original else "MISSED"
        guess = plan.latency / table.original if table.original else float("nan")
        rows.append((f"{share:.0%}", f"{guess:.1%}", f"{latency / original:.1%}", verdict, f"{taken:.0f} s"))
    table_of = text_table(("budget", "predicted", "measured again", "", "choose took"), rows)
    print("\n".join([*table_of, *refused]))


def bench(traced: TracedNetwork, target: str, folder: Path, seed: int) -> None:
    backend = get(target)
    name = re.sub(r"[^\w.-]+", "_", target)  # with its options, because one backend may be given twice
    run = folder / name
    shutil.rmtree(run, ignore_errors=True)
    started = time.perf_counter()
    table = measure_latency(traced, backend, run=run)
    taken = time.perf_counter() - started
    alone = measure_latency(traced, backend, mode="alone", run=run)  # on a CPU all of them are in the journal
    spans = traced.spans("paper")
    shapes = len(set(block_shapes(traced, spans, 1).values()))
    print(f"\n## {target}\n\n{table.environment}")
    print(f"{len(spans)} spans, {shapes} distinct shapes; the table took {taken:.0f} s; {table.calibration}")
    tables = {"alone": alone, "in context": table}
    print("20 random plans:")
    prediction(traced, backend, tables, list(random_plans(traced.network, 20, seed)))
    frontier = df.solve(table, made_up_importances(traced.network))
    print(f"{SOLVED} plans of the solver, from the fastest to the original:")
    steps = [round(n * (len(frontier) - 1) / (SOLVED - 1)) for n in range(SOLVED)]
    prediction(traced, backend, tables, [frontier[n].plan for n in dict.fromkeys(steps)])
    closed_loop(traced, backend, table, frontier)
    (folder / f"{name}.json").write_text(json.dumps(table.to_json()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=["onnxruntime", "openvino", "pytorch"])
    parser.add_argument("--folder", type=Path, default=Path("build/latency"), help="folder for journals and tables")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random plans")
    options = parser.parse_args()
    traced = mobilenet_v2()
    for target in options.targets:
        bench(traced, target, options.folder, options.seed)


if __name__ == "__main__":
    main()
