"""Every CNN of torchvision and many of timm through trace, rewrite and merge: makes docs/zoo.md.

    python benchmarks/zoo.py                    # all of them; goes on where it was stopped
    python benchmarks/zoo.py resnet18 timm/dla34  # only these, printed, nothing written

Weights are random (statistics of the batch norms too). Each network is rewritten by several random plans and merged;
the error is the largest one at the borders, in the interior and at the outputs, as a share of the largest value there.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import sys
import time
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from random import Random
from typing import Any, Literal

import torch
from zoo_models import DETECTION, SEGMENTATION, TIMM, VIDEO, build, classification, inputs_for

import depthfold as df
from depthfold.testing import random_plan, randomise_statistics

ROOT = Path(__file__).parent.parent
JOURNAL = ROOT / "build" / "zoo.jsonl"
PAGE = ROOT / "docs" / "zoo.md"
SPACES: tuple[Literal["paper", "full"], ...] = ("paper", "full", "full")
SINGLE_PRECISION_FROM = 60_000_000  # parameters: larger networks do not fit into memory three times in float64


def examine(name: str) -> dict[str, Any]:
    """One network: what it has, what is refused, and how exactly it merges."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    started = time.perf_counter()
    model, at = build(name)
    parameters = sum(p.numel() for p in model.parameters())
    precision = torch.float32 if parameters > SINGLE_PRECISION_FROM else torch.float64
    model = randomise_statistics(model.to(precision))
    row: dict[str, Any] = {"name": name, "parameters": parameters, "precision": str(precision).split(".")[1]}
    inputs = inputs_for(name, model, precision)
    network = df.trace(model, inputs, at=at)
    del model  # the network has its own copy
    row |= {
        "size": list(_size(inputs)),
        "layers": network.depth,
        "skips": len(network.skips),
        "paper": len(network.spans("paper")),
        "full": len(network.spans("full")),
        "refusals": dict(Counter(refusal.code for refusal in network.refusals).most_common()),
    }
    rng = Random(name)
    row["plans"] = [fold(network, rng, space) for space in SPACES] if network.depth else []
    return row | {"seconds": round(time.perf_counter() - started, 1)}


def fold(network: df.Network, rng: Random, space: Literal["paper", "full"]) -> dict[str, Any]:
    """Rewrite and merge by one random plan."""
    gc.collect()  # graphs hold themselves in cycles, and the largest networks fit into memory only three times
    plan = random_plan(network, rng, space)
    student = df.rewrite(network, plan)
    verification = df.verify(student, df.merge(student))
    errors = {name: getattr(verification, name) for name in ("border", "interior", "output", "ok")}
    return {"space": space, "segments": len(network.segments(plan))} | errors


def _size(inputs: Any) -> tuple[int, ...]:
    return tuple((inputs[0] if isinstance(inputs, list) else inputs).shape)


def safely(name: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    try:
        return examine(name)
    except Exception as error:  # noqa: BLE001 - a failure is a row of the table, not the end of it
        return {"name": name, "error": f"{type(error).__name__}: {error}".split("\n")[0]}


def main(names: list[str]) -> int:
    everything = not names
    names = names or [*classification(), *SEGMENTATION, *DETECTION, *VIDEO, *TIMM]
    rows = _journal() if everything else {}
    JOURNAL.parent.mkdir(exist_ok=True)
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        jobs = [pool.submit(safely, name) for name in names if name not in rows]
        for job in as_completed(jobs):
            row = job.result()
            rows[row["name"]] = row
            print(f"{len(rows):4d}/{len(names)}  {_line(row)}", flush=True)
            if everything:
                with JOURNAL.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    failed = [row for row in rows.values() if "error" in row or not all(plan["ok"] for plan in row["plans"])]
    if everything:
        PAGE.write_text(page([rows[name] for name in names]))
        print(f"wrote {PAGE.relative_to(ROOT)}")
    print(f"{len(rows)} networks, {len(failed)} failed" + "".join(f"\n  {_line(row)}" for row in failed))
    return 1 if failed else 0


def _journal() -> dict[str, dict[str, Any]]:
    if not JOURNAL.exists():
        return {}
    rows = [json.loads(line) for line in JOURNAL.read_text().splitlines() if line.endswith("}")]
    return {row["name"]: row for row in rows if "error" not in row}


def worst(row: dict[str, Any]) -> float:
    return max((max(plan["border"], plan["interior"], plan["output"]) for plan in row["plans"]), default=0.0)


def _line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['name']}: FAILED {row['error']}"
    return (
        f"{row['name']}: {row['layers']} layers, {row['paper']}/{row['full']} spans, error {worst(row):.1e}, "
        f"{row['seconds']} s"
    )


def page(rows: list[dict[str, Any]]) -> str:
    good = [row for row in rows if "error" not in row]
    lines = [
        "# The zoo",
        "",
        f"Made by `make zoo`: {len(rows)} networks, {len(rows) - len(good)} failed. "
        f"PyTorch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores.",
        "",
        "Every network has random weights and random batch norm statistics, is rewritten by three random plans (one of",
        "the paper's space, two of the full one) and merged. `error` is the largest difference between the rewritten",
        "and the merged network over the three, anywhere at the borders, in the interior or at the outputs, as a share",
        "of the largest value there; the tolerance is 1e-10 in float64 and 1e-4 in float32 (an output may miss it only",
        "where the network itself turns a last digit of its input into a tenth of that). `spans` are those of the",
        "paper's space / the full one. A network whose full space has no more spans than layers has nothing to merge.",
        "",
        "| network | parameters | input | layers | skips | spans | segments | error | precision | refused |",
        "| --- | ---: | --- | ---: | ---: | ---: | --- | ---: | --- | --- |",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['name']} | | | | | | | | | **failed: {row['error']}** |")
            continue
        refused = ", ".join(f"{code} {count}" for code, count in row["refusals"].items())
        segments = ", ".join(str(plan["segments"]) for plan in row["plans"])
        nothing = row["full"] <= row["layers"]
        lines.append(
            f"| {row['name']} | {row['parameters'] / 1e6:.1f} M | {'x'.join(map(str, row['size']))} | "
            f"{row['layers']} | {row['skips']} | "
            f"{row['paper']} / {row['full']}{' (nothing to merge)' if nothing else ''} | {segments} | "
            f"{worst(row):.1e} | {row['precision']} | {refused} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
