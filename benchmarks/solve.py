"""Measure the time of the solver, and its growth with L. Run: make bench-solve

One thread, random real tables; those of "all moves" have dropped layers and branches. The time is that of solve()
alone, from two tables in memory to a frontier in memory: the median of several runs, in wall time and in CPU time (they
differ if the machine is busy). Every row is measured in a new process: its peak memory, and the part of it that solve()
added.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import random
import resource
import statistics
import time
from typing import get_args

import numpy as np

from depthfold.core import FlaggedSpan, ImportanceTable, LatencyTable, Network, Span
from depthfold.core.options import Move
from depthfold.solver import solve
from structures import mobilenet_v2, resnet34
from tables import importance_table, latency_table, plausible_tables, tables_with_moves

REPEATS = 5
HEADER = (
    "structure", "tables", "L", "spans", "blocks", "plans", "ms", "ms of CPU", "peak MB", "by solve",
)  # fmt: skip


def independent(spans: list[Span], blocks: list[FlaggedSpan], seed: int) -> tuple[LatencyTable, ImportanceTable]:
    """Independent uniform numbers; importances are gains, so that latency and importance conflict."""
    rng = random.Random(seed)
    times = {(s.i, s.j): rng.uniform(0.1, 1.0) for s in spans}
    return latency_table(times), importance_table({(f.i, f.j, f.a, f.b): rng.uniform(0.0, 1.0) for f in blocks})


def hard(spans: list[Span], blocks: list[FlaggedSpan], seed: int) -> tuple[LatencyTable, ImportanceTable]:
    """Importance nearly proportional to latency: hardly a label beats another one."""
    rng = random.Random(seed)
    times = {(s.i, s.j): rng.uniform(0.1, 1.0) for s in spans}
    values = {(f.i, f.j, f.a, f.b): times[f.i, f.j] + rng.uniform(0.0, 0.1) for f in blocks}
    return latency_table(times), importance_table(values)


KINDS = {"independent": independent, "plausible": plausible_tables, "hard": hard}
NETWORKS = {"MobileNetV2": mobilenet_v2, "ResNet-34": resnet34}


def tables(structure: str, kind: str, depth: int) -> tuple[LatencyTable, ImportanceTable, Network | None]:
    """Return the tables of a row, and the network if layers can be dropped."""
    if kind == "all moves":
        network = NETWORKS[structure]()
        return *tables_with_moves(network, "paper", get_args(Move), 1), network
    if structure in NETWORKS:
        network = NETWORKS[structure]()
        spans, blocks = list(network.spans()), list(network.flagged_spans())
    else:
        spans = [Span(i, j) for i in range(depth) for j in range(i + 1, depth + 1)]
        blocks = [FlaggedSpan(s.i, s.j, True, True) for s in spans]
    return *KINDS[kind](spans, blocks, 1), None


def measure(structure: str, kind: str, depth: int) -> tuple[str, ...]:
    latency, importance, network = tables(structure, kind, depth)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    taken, worked = [], []
    for _ in range(REPEATS):
        start, start_cpu = time.perf_counter(), time.process_time()
        frontier = solve(latency, importance, network=network)
        taken.append((time.perf_counter() - start) * 1e3)
        worked.append((time.process_time() - start_cpu) * 1e3)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return (
        structure, kind, str(latency.depth), str(len(latency.entries)), str(len(importance.entries)),
        str(len(frontier)), f"{statistics.median(taken):.1f}",
        f"{statistics.median(worked):.1f}", f"{peak:.0f}", f"{peak - before:.0f}",
    )  # fmt: skip


def main() -> None:
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"  # for the processes to come
    cases = [("MobileNetV2", "all moves", 50), ("ResNet-34", "all moves", 32)]
    cases += [("MobileNetV2", kind, 50) for kind in KINDS]
    cases += [("dense chain", kind, depth) for kind in KINDS for depth in (25, 50, 100, 200)]
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, one used; "
          f"Python {platform.python_version()}, NumPy {np.__version__}, {platform.system()}\n")  # fmt: skip
    print("| " + " | ".join(HEADER) + " |")
    print("|" + " --- |" * len(HEADER))
    for case in cases:
        with multiprocessing.get_context("spawn").Pool(1) as fresh_process:
            print("| " + " | ".join(fresh_process.apply(measure, case)) + " |", flush=True)


if __name__ == "__main__":
    main()
