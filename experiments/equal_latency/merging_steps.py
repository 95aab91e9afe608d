"""Time what each step of a plan buys, on any stopwatch: the original, then without the activations, then merged.

    python -m experiments.equal_latency.merging_steps RUN --network mobilenet_v2 --stopwatch onnxruntime

RUN is a run of compare.py. The plans are those of its tables, wherever they are timed here, so this also shows
how plans that were made for one target do on another. For every plan, four networks are timed in the same rounds:

- the original;
- without the activations that the plan removes, and without those layers and branches that it drops;
- merged along A: as few convolutions as possible between two activations (Section 5.3 of the paper);
- merged along S, as the plan says.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import depthfold as df
from depthfold.core import Surrogate
from depthfold.errors import BudgetError
from depthfold.latency import profile_all
from depthfold.tracing import TracedNetwork
from experiments.equal_latency.candidates import SEARCHES, frontiers
from experiments.gpu_runs import record, rows
from experiments.subjects import STOPWATCHES, SUBJECTS, timed_batch

SHARES = ("80%", "65%", "50%", "35%")


def main() -> None:
    options = _arguments()
    subject, stopwatch = SUBJECTS[options.network], STOPWATCHES[options.stopwatch]
    weights = options.weights or options.run / "base.safetensors"
    traced = subject.trace(subject.load(weights) if weights.exists() else subject.build())
    times = df.LatencyTable.loads((options.run / "latency.json").read_text())
    costs = df.ImportanceTable.loads((options.run / "importance.json").read_text())
    surrogate = Surrogate.loads((options.run / "surrogate.json").read_text())
    found = frontiers(times, costs, traced.network, surrogate)
    for method in SEARCHES[:2]:
        for share in SHARES:
            key = f"steps {method} {share} {options.stopwatch}"
            if key in rows(options.run):
                continue
            try:
                plan = found[method].at(share).plan
            except BudgetError as error:
                print(f"{method}: {error}")
                continue
            inputs = subject.example(timed_batch(options.stopwatch, subject))
            modules = {name: df.merge(df.rewrite(traced, each).eval()) for name, each in steps(traced, plan).items()}
            profiles = profile_all(modules, inputs, stopwatch)
            row = {name: profile.to_json() for name, profile in profiles.items()}
            record(options.run, key, {"method": method, "at": share, "stopwatch": options.stopwatch, **row})


def steps(traced: TracedNetwork, plan: df.Plan) -> dict[str, df.Plan]:
    """Return the plans of the four networks."""
    everywhere = df.Plan(
        activations=plan.activations, cuts=_allowed(range(1, traced.depth), plan), dropped=plan.dropped
    )
    return {
        "original": traced.vanilla,
        "without activations": everywhere,
        "along A": df.Plan(activations=plan.activations, cuts=along_activations(traced, plan), dropped=plan.dropped),
        "along S": plan,
    }


def along_activations(traced: TracedNetwork, plan: df.Plan) -> list[int]:
    """Return the cuts at the activations, and as few others as possible, because not every span can be merged."""
    spans = {(span.i, span.j) for span in traced.spans("full")}
    best: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for j in range(1, traced.depth + 1):
        ends = [
            (best[i][0] + 1, [*best[i][1], i])
            for i in range(j)
            if i in best and (i, j) in spans and not any(i < l < j for l in plan.activations)
            if i == 0 or i in _allowed([i], plan)
        ]
        if ends:
            best[j] = min(ends)
    return best[traced.depth][1][1:]


def _allowed(positions: object, plan: df.Plan) -> list[int]:
    """Return the positions that are not inside a dropped branch, where there is nothing to cut."""
    inside = {l for branch in plan.dropped.branches for l in range(branch.i + 1, branch.j)}
    return [l for l in positions if l not in inside]  # type: ignore[attr-defined]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--network", choices=tuple(SUBJECTS), required=True)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--stopwatch", choices=tuple(STOPWATCHES), default="cuda")
    return parser.parse_args()


if __name__ == "__main__":
    main()
