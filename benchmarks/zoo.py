"""Trace, rewrite and merge every CNN of torchvision, many of timm and some from other packages; write docs/zoo.md.

    python benchmarks/zoo.py                      # all networks; resumes where it was stopped
    python benchmarks/zoo.py resnet18 timm/dla34  # only these, printed; the page is not written

The networks are in zoo_models.py, zoo_packages.py and zoo_others.py, the check of one network in zoo_row.py.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from zoo_models import DETECTION, OTHERS, PACKAGES, SEGMENTATION, TIMM, VIDEO, classification
from zoo_page import line, page
from zoo_row import examine, passed

ROOT = Path(__file__).parent.parent
JOURNAL = ROOT / "build" / "zoo.jsonl"
PAGE = ROOT / "docs" / "zoo.md"


def safely(name: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    try:
        return examine(name)
    except Exception as error:  # noqa: BLE001 - a failure becomes a row of the table
        return {"name": name, "error": f"{type(error).__name__}: {error}".split("\n")[0]}


def main(names: list[str]) -> int:
    everything = not names
    names = names or [*classification(), *SEGMENTATION, *DETECTION, *VIDEO, *TIMM, *PACKAGES, *OTHERS]
    rows = _journal() if everything else {}
    JOURNAL.parent.mkdir(exist_ok=True)
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        jobs = [pool.submit(safely, name) for name in names if name not in rows]
        for job in as_completed(jobs):
            row = job.result()
            rows[row["name"]] = row
            print(f"{len(rows):4d}/{len(names)}  {line(row)}", flush=True)
            if everything:
                with JOURNAL.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    failed = [row for row in rows.values() if not passed(row)]
    if everything:
        PAGE.write_text(page([rows[name] for name in names]))
        print(f"wrote {PAGE.relative_to(ROOT)}")
    print(f"{len(rows)} networks, {len(failed)} failed" + "".join(f"\n  {line(row)}" for row in failed))
    return 1 if failed else 0


def _journal() -> dict[str, dict[str, Any]]:
    if not JOURNAL.exists():
        return {}
    rows = [json.loads(text) for text in JOURNAL.read_text().splitlines() if text.endswith("}")]
    return {row["name"]: row for row in rows if "droppable layers" in row}  # skip failures and rows of an older format


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
