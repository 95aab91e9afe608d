"""Time plans that were made for one target on another, beside plans that were made for it.

    python -m experiments.equal_latency.compare latency none OTHER --network mobilenet_v2 --stopwatch onnxruntime
    python -m experiments.equal_latency.transfer RUN OTHER --network mobilenet_v2 --stopwatch onnxruntime

RUN is a run of compare.py for one target, OTHER a folder with the latency table of the target that is timed here.
Importances do not depend on the target, so both tables are solved with those of RUN. For every plan of RUN, OTHER's
plan is the fastest one whose predicted score is at least as good. The original and both plans are timed in the same
rounds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import depthfold as df
from depthfold.core import Surrogate
from depthfold.errors import BudgetError
from depthfold.latency import profile_all
from experiments.equal_latency.candidates import frontiers
from experiments.equal_latency.merging_steps import SHARES
from experiments.equal_latency.results import OURS
from experiments.gpu_runs import record, rows
from experiments.subjects import STOPWATCHES, SUBJECTS, timed_batch


def main() -> None:
    options = _arguments()
    subject, stopwatch = SUBJECTS[options.network], STOPWATCHES[options.stopwatch]
    traced = subject.trace(subject.build())
    costs = df.ImportanceTable.loads((options.run / "importance.json").read_text())
    surrogate = Surrogate.loads((options.run / "surrogate.json").read_text())
    theirs, ours = (
        frontiers(df.LatencyTable.loads((run / "latency.json").read_text()), costs, traced.network, surrogate)[OURS]
        for run in (options.run, options.other)
    )
    inputs = subject.example(timed_batch(options.stopwatch, subject))
    for share in SHARES:
        key = f"transfer {options.run.name} {share} {options.stopwatch}"
        if key in rows(options.other):
            continue
        try:
            moved = theirs.at(share)
        except BudgetError as error:
            print(error)
            continue
        made = next(point for point in ours if point.importance >= moved.importance)  # by rising latency
        plans = {"original": traced.vanilla, "moved": moved.plan, "made": made.plan}
        modules = {name: df.merge(df.rewrite(traced, plan).eval()) for name, plan in plans.items()}
        profiles = profile_all(modules, inputs, stopwatch)
        record(
            options.other, key,
            {"at": share, "stopwatch": options.stopwatch, "plan": str(moved.plan),
             "from": options.run.name, "made for": theirs.environment.to_json(),
             **{name: profile.to_json() for name, profile in profiles.items()}},
        )  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("other", type=Path)
    parser.add_argument("--network", choices=tuple(SUBJECTS), required=True)
    parser.add_argument("--stopwatch", choices=tuple(STOPWATCHES), required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
