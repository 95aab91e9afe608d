"""Test whether the activations that a plan omits explain the prediction errors on a GPU.

    python -m experiments.latency_h200.left_out_activations [experiments/latency_h200]

For every row of results.jsonl, compute over its random plans the correlation between the prediction error in ms and the
number of elements in the omitted activations. Also compute the errors before and after subtracting a constant per
element. This constant is fitted to the same plans, so the result is the best possible improvement, not a prediction. A
table with bare times already includes such a constant; for it, the result shows the remaining effect.
"""

from __future__ import annotations

import json
import math
import sys
from functools import cache
from pathlib import Path

import numpy as np

import depthfold as df
from depthfold.latency.blocks import timed_with_activation
from depthfold.tracing import TracedNetwork
from experiments.latency_h200.cases import build

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from latency import random_plans

HERE = Path(__file__).parent


@cache
def network_named(name: str) -> TracedNetwork:
    return build(name, 1, 224)  # elements of one example; the batch is only a constant factor


def left_out(traced: TracedNetwork, plan: df.Plan) -> int:
    network, active = traced.network, traced.network.final_activations(plan)
    bare = [s for s in network.segments(plan) if timed_with_activation(network, s) and s.j not in active]
    layers = [traced.network.layers[span.j - 1] for span in bare]
    return sum(layer.shape.out_channels * math.prod(layer.out_size) for layer in layers)


def main(folder: Path) -> None:
    print("correlation, errors before (median / worst), after | row")
    for line in (folder / "results.jsonl").read_text().splitlines():
        record = json.loads(line or "{}")
        if not record:
            continue
        traced = network_named(record["network"])
        table = df.LatencyTable.read_csv(folder / (record["key"].replace(" ", "_") + ".csv"))
        errors = np.array(record["errors in context"]["random"])
        plans = list(random_plans(traced.network, len(errors), 1))
        guesses = np.array([table.predict(traced.network, plan) for plan in plans])
        measured = guesses / (1 + errors)
        elements = np.array([left_out(traced, plan) for plan in plans], dtype=float)
        constant = elements @ (guesses - measured) / (elements @ elements)
        after = (guesses - constant * elements) / measured - 1
        correlation = np.corrcoef(elements, guesses - measured)[0, 1]
        before_and_after = (f"{np.median(abs(e)):.1%} / {abs(e).max():.1%}" for e in (errors, after))
        print(f"{correlation:+.2f}, {', '.join(before_and_after)} | {record['key']}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
