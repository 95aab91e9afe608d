"""Frontiers of the solver before it knew dropped layers, stored in solver/golden_frontiers.json.

The file was written by the solver of commit 6cacab9. To write it again, run this script with that version of depthfold
and of the tests, and without this folder on the path (-P):

    git worktree add build/before 6cacab9
    PYTHONPATH=build/before/src:build/before/tests python -P tests/golden_frontiers.py
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from depthfold.core import ImportanceTable, LatencyTable, Network
from depthfold.solver import solve
from structures import mobilenet_v2, resnet34
from tables import plausible_tables, small_instance, two_times_instance, with_two_times

FILE = Path(__file__).parent / "solver" / "golden_frontiers.json"
SMALL = range(60)

Instance = tuple[LatencyTable, ImportanceTable, dict[str, Any]]


def instances() -> Iterator[tuple[str, Instance]]:
    """Yield named tables with the arguments of solve()."""
    for seed in SMALL:
        yield f"small {seed}", (*small_instance(seed), {})
        yield f"two times {seed}", (*two_times_instance(seed), {})
    for network in (mobilenet_v2(), resnet34()):
        latency, importance = plausible_tables(network.spans(), network.flagged_spans(), 7)
        cheaper = with_two_times(latency, lambda span, time: (0.9 if len(span) % 2 else 1.0) * time)
        yield network.name, (cheaper, importance, {"network": network})
    yield "MobileNetV2 with alpha", (*_tables(mobilenet_v2(), 8), {"alpha": 1.6})


def _tables(network: Network, seed: int) -> tuple[LatencyTable, ImportanceTable]:
    return plausible_tables(network.spans(), network.flagged_spans(), seed)


def plans_of(instance: Instance) -> list[list[Any]]:
    """Return a row for each plan: its latency, importance, latency by activations, and A, S and B in hexadecimal."""
    latency, importance, given = instance
    rows = []
    for point in solve(latency, importance, **given).points:
        sets = (_hexadecimal(positions) for positions in (point.activations, point.cuts, point.boundaries))
        rows.append([point.latency, point.importance, point.latency_by_activations, *sets])
    return rows


def _hexadecimal(positions: Iterable[int]) -> str:
    return f"{sum(1 << position for position in positions):x}"


if __name__ == "__main__":
    lines = [f"{json.dumps(name)}: {json.dumps(plans_of(instance))}" for name, instance in instances()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
