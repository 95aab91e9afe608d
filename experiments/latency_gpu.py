"""Latency on a GPU: MobileNetV2-1.0, -1.4 and VGG19-BN at 224, in three precisions, on three runtimes.

    python experiments/latency_gpu.py FOLDER [--minutes 9]

For each network, precision and runtime: the table, measured and calibrated; the original, every block merged, and the
fastest plan by the table, timed in turns; predicted against measured over 20 random plans (VGG: 10) of all depths and
over plans of the solver (with made-up importances). FOLDER gets a CSV table and a line of results.jsonl for each; run
again, what is there is not measured again, and what was measured of a table before an interruption is in its journal.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import torch

import depthfold as df
from depthfold.backends.inductor import Inductor
from depthfold.backends.pytorch import PyTorch
from depthfold.core.document import encode
from depthfold.latency import Timer, measure_latency
from depthfold.latency.blocks import block_module, block_shapes
from depthfold.latency.candidates import network_inputs, shallow_of
from depthfold.latency.measure import RANDOM_SHARE
from depthfold.latency.samples import fast_plans, plans_of_all_depths
from depthfold.tracing import TracedNetwork
from depthfold.vision import import_torchvision

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from latency import STEM_AND_HEAD, end_to_end, made_up_importances, predicted
from latency import plans_of_all_depths as test_plans

TIMER = Timer(warmup=0.2, turns=4, turn=0.01, extra=4)
WHOLE = Timer(warmup=0.2, turns=6, turn=0.02)
# What a user would run: half precision and TF32 like their maps with the channels last.
PRECISIONS = {"float32": False, "tf32": True, "float16": True}


def build(name: str, batch: int, size: int) -> TracedNetwork:
    models = import_torchvision().models
    x = torch.randn(batch, 3, size, size)
    torch.manual_seed(0)
    if name == "vgg19-bn":
        return df.trace(models.vgg19_bn(weights=None).eval(), x)
    width = float(name.rpartition("-")[2])
    return df.trace(models.mobilenet_v2(weights=None, width_mult=width).eval(), x, ignore=STEM_AND_HEAD)


def every_block_merged(network: df.Network) -> df.Plan:
    """Inverted residuals end where the network has no activation, the stages of VGG at its barriers; an activation
    stands after each."""
    own = network.activations
    ends = sorted({l for l in range(1, network.depth) if l not in own} | set(network.barriers))
    return df.Plan(activations=[*ends, network.depth], cuts=ends)


def runtimes(device: str, channels_last: bool, precision: str) -> dict[str, PyTorch | Inductor]:
    same = dict(device=device, precision=precision, channels_last=channels_last)
    found: dict[str, PyTorch | Inductor] = {"pytorch": PyTorch(**same)}
    if device == "cuda":
        found["pytorch with CUDA graphs"] = PyTorch(**same, cuda_graphs=True)
    return found | {"inductor": Inductor(**same)}


def warm_compiler(name: str, batch: int, size: int, backend: Inductor, worker: int, workers: int) -> None:
    """Compile a part of what will be timed, so that TorchInductor finds it in its cache."""
    network = build(name, batch, size)
    spans = network.spans("paper")
    blocks = sorted({block.key: block for block in block_shapes(network, spans, batch).values()}.items())
    for _, block in blocks[worker::workers]:
        backend.compile(block_module(network, block), block.inputs()).close()
    networks, tests = counts(network)
    plans = [*plans_of_all_depths(network, spans, round(RANDOM_SHARE * networks)), *test_plans(network, tests, 1)]
    for plan in plans[worker::workers]:
        backend.compile(shallow_of(network, plan), network_inputs(network)).close()


def errors(network: TracedNetwork, table: df.LatencyTable, plans: list[df.Plan], measured: list[float]) -> list[float]:
    guesses = [predicted(table, network.segments(plan)) for plan in plans]
    return [guess / latency - 1 for guess, latency in zip(guesses, measured, strict=True)]


def counts(network: df.Network) -> tuple[int, int]:
    """How many whole networks to calibrate on, and how many to test: VGG has only 36 spans."""
    return (8, 10) if network.depth < 20 else (14, 20)


def examine(network: TracedNetwork, backend: PyTorch | Inductor, journal: Path) -> tuple[df.LatencyTable, dict]:
    started = time.perf_counter()
    networks, tests = counts(network)
    table = measure_latency(network, backend, journal=journal, timer=TIMER, networks=networks)
    took = time.perf_counter() - started
    alone = measure_latency(network, backend, mode="alone", journal=journal, timer=TIMER)
    (fastest,) = fast_plans(network, table.times, 1)
    compared = {"original": network.vanilla, "every block merged": every_block_merged(network), "fastest": fastest}
    random = list(test_plans(network, tests, 1))
    frontier = df.solve(table, made_up_importances(network))
    solved = [frontier[round(n * (len(frontier) - 1) / 5)].plan for n in range(1, 6)]
    plans = [*compared.values(), *random, *solved]
    measured = end_to_end(network, backend, plans, WHOLE)
    result = {
        "milliseconds": dict(zip(compared, measured, strict=False)),
        "fastest": {"activations": sorted(fastest.activations), "cuts": list(fastest.cuts)},
        "calibration": encode(table.calibration),
        "seconds for the table": round(took, 1),
        "spans without a time": len(table.entries) - len(table.times),
    }
    for name, one in (("in context", table), ("alone", alone)):
        found = errors(network, one, plans, measured)
        result[f"errors {name}"] = {"compared": found[:3], "random": found[3 : 3 + tests], "solver": found[3 + tests :]}
    return table, result


def row(record: dict) -> str:
    times = list(record["milliseconds"].values())
    random = [abs(error) for error in record["errors in context"]["random"]]
    alone = [abs(error) for error in record["errors alone"]["random"]]
    solver = [abs(error) for error in record["errors in context"]["solver"]]
    return (
        f"| {record['network']} | {record['precision']} | {record['runtime']} | "
        + " | ".join(f"{t:.2f}" for t in times)
        + f" | {times[0] / min(times):.2f} | {median(alone):.1%} / {max(alone):.1%} | "
        f"{median(random):.1%} / {max(random):.1%} | {median(solver):.1%} / {max(solver):.1%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=1e9, help="start nothing new after so many")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", type=int, nargs=2, default=(128, 64), help="of MobileNetV2, and of VGG")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--workers", type=int, default=10, help="processes that compile ahead for inductor")
    parser.add_argument("--only", default="", help="part of a name: what to measure, as in 'tf32 inductor'")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * options.minutes
    results = options.folder / "results.jsonl"
    done = {json.loads(line)["key"] for line in results.read_text().splitlines()} if results.exists() else set()
    batches = {
        "mobilenetv2-1.0": options.batches[0],
        "mobilenetv2-1.4": options.batches[0],
        "vgg19-bn": options.batches[1],
    }
    wanted = [
        (runtime, precision, name)
        for runtime in ("pytorch", "pytorch with CUDA graphs", "inductor")
        for name in batches
        for precision in PRECISIONS
    ]
    for runtime, precision, name in wanted:
        key = f"{name} {precision} {runtime}"
        if key in done or not all(word in key for word in options.only.split()) or time.monotonic() > deadline:
            continue
        if options.device == "cpu" and precision != "float32":
            continue
        backend = runtimes(options.device, PRECISIONS[precision], precision).get(runtime)
        if backend is None:
            continue
        started = time.monotonic()
        if isinstance(backend, Inductor) and options.workers > 1:
            jobs = [(name, batches[name], options.size, backend, n, options.workers) for n in range(options.workers)]
            with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
                list(pool.map(warm_compiler, *zip(*jobs, strict=True)))
            print(f"{key}: compiled ahead in {time.monotonic() - started:.0f} s", flush=True)
        network = build(name, batches[name], options.size)
        journal = options.folder / (key.replace(" ", "_") + ".journal")
        table, result = examine(network, backend, journal)
        environment = backend.environment(network_inputs(network)).to_json()
        head = {"key": key, "network": name, "precision": precision, "runtime": runtime}
        record = head | result | {"environment": environment, "seconds": round(time.monotonic() - started, 1)}
        replace(table, network=name).write_csv(options.folder / (key.replace(" ", "_") + ".csv"))
        with results.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(row(record), f"{record['seconds']} s", flush=True)
        del network, table
        gc.collect()
        torch.compiler.reset()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    print(
        "| network | precision | runtime | original, ms | every block merged | fastest | times as fast "
        "| error alone, median / worst | in context | in context, solver's plans |\n" + "| --- " * 10 + "|"
    )
    for line in results.read_text().splitlines():
        print(row(json.loads(line)))


if __name__ == "__main__":
    main()
