"""Does the latency table tell the truth? Run: make bench-latency, or this file with names of runtimes behind it.

MobileNetV2-1.0 at 224, batch 1, without stem and head, as the paper has it. On each runtime, in one run:
the table is measured and calibrated; 20 random plans of all depths are built and timed end to end (the first has the
segments of the original, which the calibration has seen; the others are new); predicted against measured, for blocks
alone and in context. The same for plans of the solver. Then choose() is asked for five budgets, and what it returns is
measured afresh beside the original.

The importances are made up, a random loss per activation that goes: what is tested here is latency.
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
from depthfold.core.describe import text_table
from depthfold.errors import BudgetError
from depthfold.latency import Timer, choose, measure_latency
from depthfold.latency.blocks import block_shapes
from depthfold.latency.building import held
from depthfold.latency.candidates import build_plan, network_inputs
from depthfold.latency.timer import Turns, milliseconds
from depthfold.tracing import TracedNetwork
from depthfold.vision import import_torchvision

SOLVED = 10
WHOLE = Timer(turns=10)
BUDGETS = (0.5, 0.6, 0.7, 0.8, 0.9)
STEM_AND_HEAD = ["features.0", "features.18"]


def mobilenet_v2(width: float = 1.0, batch: int = 1) -> TracedNetwork:
    model = import_torchvision().models.mobilenet_v2(weights=None, width_mult=width)
    return df.trace(model.eval(), torch.randn(batch, 3, 224, 224), ignore=STEM_AND_HEAD)


def random_plans(network: df.Network, count: int, seed: int) -> Iterable[df.Plan]:
    """From every layer for itself to the longest span that starts at each cut, with activations at random cuts."""
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


def end_to_end(network: TracedNetwork, backend: Backend, plans: Iterable[df.Plan], timer: Timer = WHOLE) -> list[float]:
    """Latencies of whole networks, measured in turns."""
    compiled: dict[int, Compiled] = {}
    turns: dict[int, Turns] = {}
    with held(compiled):
        for n, plan in enumerate(plans):
            compiled[n] = build_plan(network, backend, plan, network_inputs(network))
        timer.measure(compiled, turns)
    return [milliseconds(turns[n]) for n in compiled]


def prediction(
    network: TracedNetwork, backend: Backend, tables: dict[str, df.LatencyTable], plans: list[df.Plan]
) -> None:
    measured = end_to_end(network, backend, plans)
    rows, errors = [], {name: [] for name in tables}
    for plan, latency in zip(plans, measured, strict=True):
        row = [str(len(network.segments(plan))), f"{latency:.2f}"]
        for name, table in tables.items():
            guess = table.predict(network, plan)
            errors[name].append(abs(guess / latency - 1))
            row += [f"{guess:.2f}", f"{guess / latency - 1:+.1%}"]
        rows.append(tuple(row))
    header = ("segments", "measured, ms", *(title for name in tables for title in (f"{name}, ms", "error")))
    print("\n".join(text_table(header, rows)))
    for name, found in errors.items():
        print(f"{name}: error {median(found):.1%} in the median, {max(found):.1%} at worst")


def closed_loop(network: TracedNetwork, backend: Backend, table: df.LatencyTable, frontier: df.Frontier) -> None:
    rows, refused = [], []
    for share in BUDGETS:
        started = time.perf_counter()
        try:
            plan = choose(network, frontier, df.Budget.share(share), backend)
        except BudgetError as error:
            rows.append((f"{share:.0%}", "-", "-", "infeasible", ""))
            refused.append(str(error))
            continue
        taken = time.perf_counter() - started
        original, latency = end_to_end(network, backend, [network.vanilla, plan.plan])
        verdict = "met" if latency <= share * original else "MISSED"
        guess = plan.latency / table.original if table.original else float("nan")
        rows.append((f"{share:.0%}", f"{guess:.1%}", f"{latency / original:.1%}", verdict, f"{taken:.0f} s"))
    table_of = text_table(("budget", "predicted", "measured afresh", "", "choose took"), rows)
    print("\n".join([*table_of, *refused]))


def bench(network: TracedNetwork, target: str, folder: Path, seed: int) -> None:
    backend = get(target)
    name = re.sub(r"[^\w.-]+", "_", target)  # with its options: one backend may be there twice
    run = folder / name
    shutil.rmtree(run, ignore_errors=True)
    started = time.perf_counter()
    table = measure_latency(network, backend, run=run)
    taken = time.perf_counter() - started
    alone = measure_latency(network, backend, mode="alone", run=run)  # on a CPU the journal has them all
    spans = network.spans("paper")
    shapes = len(set(block_shapes(network, spans, 1).values()))
    print(f"\n## {target}\n\n{table.environment}")
    print(f"{len(spans)} spans, {shapes} distinct shapes; the table took {taken:.0f} s; {table.calibration}")
    tables = {"alone": alone, "in context": table}
    print("20 random plans:")
    prediction(network, backend, tables, list(random_plans(network, 20, seed)))
    frontier = df.solve(table, made_up_importances(network))
    print(f"{SOLVED} plans of the solver, from the fastest to the original:")
    steps = [round(n * (len(frontier) - 1) / (SOLVED - 1)) for n in range(SOLVED)]
    prediction(network, backend, tables, [frontier[n].plan for n in dict.fromkeys(steps)])
    closed_loop(network, backend, table, frontier)
    (folder / f"{name}.json").write_text(json.dumps(table.to_json()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=["onnxruntime", "openvino", "pytorch"])
    parser.add_argument("--folder", type=Path, default=Path("build/latency"), help="where journals and tables go")
    parser.add_argument("--seed", type=int, default=1, help="of the random plans")
    options = parser.parse_args()
    network = mobilenet_v2()
    for target in options.targets:
        bench(network, target, options.folder, options.seed)


if __name__ == "__main__":
    main()
