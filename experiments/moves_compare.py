"""Print the accuracy and the measured latency of the plans of each search.

python experiments/moves_compare.py RUN ...        # folders of experiments/moves_gpu.py
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from gpu_runs import rows


def main(run: Path) -> None:
    groups: dict[tuple[float, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows(run).values():
        if "rule" in row:
            groups[row["share"], row["rule"]].append(row)
    print(f"\n{run.name}\n")
    print("| latency | search | predicted, ms | measured, ms | times as fast | test accuracy by seed | mean |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for (share, rule), found in sorted(groups.items(), key=lambda item: (-item[0][0], item[0][1])):
        scores = [row["test"] for row in found]
        predicted, measured = found[0]["predicted"], fmean(row["measured"] for row in found)
        texts = ", ".join(f"{score:.2f}" for score in scores)
        speed = fmean(row["original"] for row in found) / measured
        print(
            f"| {share:.0%} | {rule} | {predicted:.3f} | {measured:.3f} | {speed:.2f} | {texts} | {fmean(scores):.2f} |"
        )


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        main(Path(argument))
