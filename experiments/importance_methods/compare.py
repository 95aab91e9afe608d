"""Print how well each method of importance ranks the blocks, what it costs, and how good its plans are.

python -m experiments.importance_methods.compare RUN        # a folder of experiments/importance_methods/measure.py
"""

from __future__ import annotations

import sys
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from statistics import fmean
from typing import Any

from scipy.stats import kendalltau, spearmanr

from depthfold.core import FlaggedSpan, ImportanceTable, Plan, Score, Surrogate
from depthfold.errors import InvalidValue
from depthfold.solver.surrogate import fit_to_plans
from experiments.gpu_runs import rows


def load(run: Path, name: str) -> ImportanceTable:
    return ImportanceTable.loads((run / f"importance-{name}.json").read_text())


def reference(run: Path) -> ImportanceTable:
    """Return the table of "trained" with the samples of both seeds, or of the only one that is there."""
    seeds = [load(run, name) for name in ("trained-0", "trained-1") if (run / f"importance-{name}.json").exists()]
    samples: dict[FlaggedSpan, tuple[float, ...]] = {}
    for table in seeds:
        for entry in table.entries:
            samples[entry.span] = (*samples.get(entry.span, ()), *entry.samples)
    first = seeds[0]
    entries = tuple(Score(span=span, samples=found) for span, found in samples.items() if found)
    return ImportanceTable(network=first.network, fingerprint=first.fingerprint, base=first.base, entries=entries)


def several(table: ImportanceTable) -> dict[FlaggedSpan, float]:
    """Return the importances of the blocks of two or more layers."""
    return {block: value for block, value in table.importances.items() if len(block.span) > 1}


def correlation(one: ImportanceTable, two: ImportanceTable) -> tuple[float, int]:
    """Return Spearman's correlation over the blocks that both tables have, and their number."""
    x, y = several(one), several(two)
    common = [block for block in x if block in y]
    return float(spearmanr([x[b] for b in common], [y[b] for b in common]).statistic), len(common)


def _cost(value: float | None, reference: float | None) -> tuple[str, str]:
    if value is None:
        return "", ""
    return f"{value:.1f}", f"1/{reference / value:.1f}" if reference else ""


def main(run: Path) -> None:
    results = rows(run)
    truth, first = reference(run), load(run, "trained-0")
    known = sorted(path.name[len("importance-") : -len(".json")] for path in run.glob("importance-*.json"))
    print("| table | seconds | of trained | busy | of trained | Spearman with seed 0 | with both seeds | blocks |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    cost = results.get("table trained-0", {})
    for name in known:
        table, row = load(run, name), results.get(f"table {name}", {})
        figures = [text for what in ("seconds", "busy") for text in _cost(row.get(what), cost.get(what))]
        to_first, number = correlation(table, first)
        to_both, _ = correlation(table, truth)
        print(f"| {name} | {' | '.join(figures)} | {to_first:.3f} | {to_both:.3f} | {number} |")
    plans = {key: row for key, row in results.items() if key.startswith("plan ")}
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for key, row in plans.items():
        _, name, share, _ = key.split()
        groups.setdefault((share, name), []).append(row)
    print("\n| latency | plan of | ms | test accuracy by seed | mean |")
    print("| --- | --- | ---: | ---: | ---: |")
    for (share, name), found in sorted(groups.items(), reverse=True):
        scores = [row["test"] for row in found]
        texts = ", ".join(f"{score:.2f}" for score in scores)
        print(f"| {float(share):.0%} | {name} | {found[0]['latency']:.3f} | {texts} | {fmean(scores):.2f} |")
    for path in sorted(run.glob("surrogate-*.json")):
        found = Surrogate.loads(path.read_text())
        print(f"\n{path.stem}: {found}\nKendall's tau of the same trained plans with other tables:\n")
        print("| table | fitted | each plan left out | sum of importances alone |")
        print("| --- | ---: | ---: | ---: |")
        for name in known:
            print(f"| {name} | {' | '.join(f'{tau:.2f}' for tau in taus(load(run, name), found))} |")


def taus(table: ImportanceTable, trained: Surrogate) -> tuple[float, float, float]:
    """Return Kendall's tau of the scores of trained plans with three predictions from an importance table.

    They are not numbers if the table lacks blocks of a plan.
    """
    values = [importance_of(table, plan.plan) for plan in trained.plans]
    scores = [plan.score for plan in trained.plans]
    if any(value == -inf for value, _ in values):
        return nan, nan, nan
    alone = float(kendalltau([value for value, _ in values], scores).statistic)
    try:
        found = refitted(table, trained)
    except InvalidValue:  # the importances do not predict the scores
        return nan, nan, alone
    predicted = [found.predict(value, blocks) for value, blocks in values]
    return float(kendalltau(predicted, scores).statistic), found.tau, alone


def refitted(table: ImportanceTable, trained: Surrogate) -> Surrogate:
    """Return the surrogate of another importance table, fitted to plans that were trained before."""
    found = ((plan, *importance_of(table, plan.plan)) for plan in trained.plans)
    plans = [replace(plan, importance=value, blocks=blocks) for plan, value, blocks in found]
    return fit_to_plans(plans, network=table.network, fingerprint=table.fingerprint, provenance=trained.provenance)


def importance_of(table: ImportanceTable, plan: Plan) -> tuple[float, int]:
    """Return the largest sum of importances over the ways to divide a plan into blocks, and the number of blocks.

    No activation is inside a block, and the flags of a block say whether there is one at its ends.
    """
    kept = {0, *plan.activations, table.depth}
    best: dict[int, tuple[float, int]] = {0: (0.0, 0)}
    for block, value in sorted(table.importances.items(), key=lambda item: item[0].j):
        inside = any(l in kept for l in range(block.i + 1, block.j))
        if block.i not in best or inside or (block.a, block.b) != (block.i in kept, block.j in kept):
            continue
        total, blocks = best[block.i]
        best[block.j] = max(best.get(block.j, (-inf, 0)), (total + value, blocks + 1))
    return best.get(table.depth, (-inf, 0))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
