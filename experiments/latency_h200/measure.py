"""Measure latencies on a GPU: MobileNetV2-1.0, -1.4 and VGG19-BN at 224x224, in three precisions, on three runtimes.

    python -m experiments.latency_h200.measure FOLDER [--minutes 9] [--only "tf32 inductor"]

For each network, precision and runtime, measure and calibrate the table; time the original, the network with every
block merged and the fastest plan of the table in rounds; compare predicted with measured latencies over 20 random plans
of all depths (VGG: 10) and over plans from the solver (with made-up importances). Each case writes a CSV table and a
line of results.jsonl to FOLDER. If you run it again, finished cases are skipped, and an interrupted table resumes from
its journal.

To detect drift, the original and the network with every block merged are also timed before the table. If either has
changed at the end, or the original since the calibration, something else ran on the machine or its clocks changed. The
case is then discarded with its journal, and measured again.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

import depthfold as df
from depthfold.backends.inductor import Inductor
from depthfold.backends.pytorch import PyTorch
from depthfold.errors import SpoiledDevice, TableError
from depthfold.latency import Timer, measure_latency
from depthfold.latency.journal import LatencyJournal
from depthfold.support.document import encode
from depthfold.tracing import TracedNetwork
from experiments.latency_h200.cases import Case, build, cases, every_block_merged

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from latency import end_to_end, made_up_importances, random_plans

TIMER = Timer(warmup=0.05, rounds=4, round_seconds=0.01, extra=4)
WHOLE = Timer(warmup=0.1, rounds=6, round_seconds=0.02)


# The largest relative change of a network's time between the start and the end of a row.
DRIFT = 0.05
TRIES = 2


class Disturbed(Exception):
    """Raised if the machine became faster or slower during a row."""


def errors(traced: TracedNetwork, table: df.LatencyTable, plans: list[df.Plan], measured: list[float]) -> list[float]:
    guesses = [table.predict(traced.network, plan) for plan in plans]
    return [guess / latency - 1 for guess, latency in zip(guesses, measured, strict=True)]


def counts(network: df.Network) -> tuple[int, int]:
    """Return how many whole networks to calibrate on and how many to test. VGG has only 36 spans."""
    return (8, 10) if network.depth < 20 else (14, 20)


def examine(traced: TracedNetwork, backend: PyTorch | Inductor, run: Path) -> tuple[df.LatencyTable, dict]:
    networks, tests = counts(traced.network)
    compared = {"original": traced.vanilla, "every block merged": every_block_merged(traced.network)}
    before = end_to_end(traced, backend, compared.values(), WHOLE)
    started = time.perf_counter()
    table = measure_latency(traced, backend, run=run, timer=TIMER, networks=networks)
    took = time.perf_counter() - started
    alone = measure_latency(traced, backend, mode="alone", run=run, timer=TIMER)
    random = list(random_plans(traced.network, tests, 1))
    frontier = df.solve(table, made_up_importances(traced.network))
    compared["fastest"] = frontier[0].plan
    solved = [frontier[round(n * (len(frontier) - 1) / 5)].plan for n in range(1, 6)]
    plans = [*compared.values(), *random, *solved]
    measured = end_to_end(traced, backend, plans, WHOLE)
    with LatencyJournal(run, traced, table.environment) as journal:
        original = journal.add_plan(traced.vanilla)
        if not journal.is_timed(original):
            raise TableError(f"The original network could not be timed: {journal.reasons.get(original)}")
        meanwhile = journal.time(original)
    drift = [measured[0] / before[0] - 1, measured[1] / before[1] - 1, measured[0] / meanwhile - 1]
    if max(map(abs, drift)) > DRIFT:
        changes = ", ".join(f"{change:+.1%}" for change in drift)
        raise Disturbed(f"the times of two networks changed by {changes} since the start or the calibration")
    result = {
        "milliseconds": dict(zip(compared, measured, strict=False)),
        "fastest": {"activations": sorted(compared["fastest"].activations), "cuts": list(compared["fastest"].cuts)},
        "drift": drift,
        "calibration": encode(table.calibration),
        "seconds for the table": round(took, 1),
        "spans without a time": len(table.entries) - len(table.times),
    }
    for name, one in (("in context", table), ("alone", alone)):
        found = errors(traced, one, plans, measured)
        result[f"errors {name}"] = {"compared": found[:3], "random": found[3 : 3 + tests], "solver": found[3 + tests :]}
    return table, result


def row(record: dict) -> str:
    times = list(record["milliseconds"].values())
    random = [abs(error) for error in record["errors in context"]["random"]]
    compared = [f"{error:+.1%}" for error in record["errors in context"]["compared"]]
    alone = [abs(error) for error in record["errors alone"]["random"]]
    solver = [abs(error) for error in record["errors in context"]["solver"]]
    return (
        f"| {record['network']} | {record['precision']} | {record['runtime']} | "
        + " | ".join(f"{t:.2f}" for t in times)
        + f" | {times[0] / min(times):.2f} | {median(alone):.1%} / {max(alone):.1%} | "
        f"{median(random):.1%} / {max(random):.1%} | {median(solver):.1%} / {max(solver):.1%} | {', '.join(compared)} |"
    )


def measure(case: Case, folder: Path) -> dict:
    started = time.monotonic()
    traced, run = build(case.name, case.batch, case.size), case.file(folder, ".run")
    for left in reversed(range(TRIES)):
        try:
            table, result = examine(traced, case.backend, run)
            break
        except Disturbed as disturbed:
            shutil.rmtree(run)
            print(f"{case.key}: {disturbed}; discarded", flush=True)
            if not left:
                raise
    environment = case.backend.environment(traced.example_tensors()).to_json()
    replace(table, network=case.name).write_csv(case.file(folder, ".csv"))
    head = {"key": case.key, "network": case.name, "precision": case.precision, "runtime": case.runtime}
    return head | result | {"environment": environment, "seconds": round(time.monotonic() - started, 1)}


def known(results: Path, asked: list[Case]) -> dict[str, dict]:
    """Return the records of earlier runs. A truncated last line is ignored, so that its case is measured again."""
    shapes = {case.key: f"{case.batch} of {case.size}" for case in asked}
    found = {}
    for line in results.read_text().splitlines() if results.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            record = json.loads(line)
            there = f"{record['environment']['batch']} of {record['environment']['input_size'][-1]}"
            if there != shapes.get(record["key"], there):
                raise SystemExit(
                    f"{results}: {record['key']} was measured with a batch of {there}. Use another folder."
                )
            found[record["key"]] = record
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=1e5, help="start no new case after this many minutes")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", type=int, nargs=2, default=(128, 64), help="batch sizes of MobileNetV2 and of VGG")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--only", default="", help="words in the names of the cases to measure ('tf32 inductor')")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * options.minutes
    results = options.folder / "results.jsonl"
    asked = list(cases(options))
    done = known(results, asked)
    wanted = [case for case in asked if case.key not in done and all(word in case.key for word in options.only.split())]
    for case in wanted:
        if time.monotonic() > deadline:
            break
        try:
            done[case.key] = measure(case, options.folder)
        except SpoiledDevice as error:
            raise SystemExit(f"{case.key}: {error} The finished cases are in {options.folder}.") from error
        except (df.DepthfoldError, RuntimeError, Disturbed) as error:  # continue with the other cases
            print(f"{case.key}: {type(error).__name__}: {error}", flush=True)
            continue
        with results.open("a") as file:
            file.write("\n" + json.dumps(done[case.key]))
        print(row(done[case.key]), f"{done[case.key]['seconds']} s", flush=True)
        gc.collect()
        torch.compiler.reset()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    print(
        "| network | precision | runtime | original, ms | every block merged | fastest | times as fast "
        "| error alone, median / worst | in context | in context, solver's plans | in context, those three |\n"
        + "| --- " * 11
        + "|"
    )
    for record in done.values():
        print(row(record))


if __name__ == "__main__":
    main()
