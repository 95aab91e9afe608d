"""Print how well each method of importance ranks the blocks, what it costs, and how good its plans are.

python experiments/importance_compare.py RUN        # a folder of experiments/importance_methods.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from scipy.stats import kendalltau, spearmanr

from depthfold.core import FlaggedSpan, ImportanceTable, Score, Surrogate


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


def main(run: Path) -> None:
    rows: dict[str, dict[str, Any]] = {}
    for line in (run / "results.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows[row["key"]] = row
    truth, first = reference(run), load(run, "trained-0")
    known = sorted(path.name[len("importance-") : -len(".json")] for path in run.glob("importance-*.json"))
    print("| table | seconds | of trained | Spearman with trained, seed 0 | with both seeds | blocks |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    cost = rows.get("table trained-0", {}).get("seconds")
    for name in known:
        table, row = load(run, name), rows.get(f"table {name}", {})
        seconds = row.get("seconds")
        share = f"1/{cost / seconds:.1f}" if cost and seconds else ""
        to_first, number = correlation(table, first)
        to_both, _ = correlation(table, truth)
        print(
            f"| {name} | {f'{seconds:.1f}' if seconds else ''} | {share} | {to_first:.3f} | {to_both:.3f} | {number} |"
        )
    print("\n| plan of | share | latency, ms | accuracy, hold-out | test | importance |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for key, row in sorted(rows.items()):
        if key.startswith("plan "):
            _, name, share = key.split()
            figures = [row["latency"], row["holdout"], row["test"], row["importance"]]
            print(f"| {name} | {share} | " + " | ".join(f"{figure:.3f}" for figure in figures) + " |")
    for path in sorted(run.glob("surrogate-*.json")):
        found = Surrogate.loads(path.read_text())
        fitted = [found.predict(plan.importance, plan.blocks) for plan in found.plans]
        scores = [plan.score for plan in found.plans]
        alone = kendalltau([plan.importance for plan in found.plans], scores).statistic
        print(f"\n{path.stem}: {found}")
        print(f"Kendall's tau: fitted {kendalltau(fitted, scores).statistic:.2f}, importances alone {alone:.2f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
