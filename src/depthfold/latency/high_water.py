"""Run as a process of its own: how far memory rises above its level before while an exported module runs.

python -m depthfold.latency.high_water module.pt2 '[[[1, 3, 224, 224], "float32"]]'
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def high_water() -> int:
    """The most memory that this process has had, in bytes."""
    lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines() if ":" in line)
    return int(lines["VmHWM"].split()[0]) * 1024


def start_again() -> None:
    """Set the high-water mark back to what is in use now. Where the system does not let us, importing PyTorch may have
    been the highest point, and nothing is known of the module."""
    try:
        RESET.write_text("5")
    except OSError as error:
        raise SystemExit(f"this system cannot set the high-water mark of a process back ({error})") from error


def stay_on_one_core() -> None:
    """Linux counts the pages of a process by thread or by core and adds them up late: with a thread on each of many
    cores the mark would be megabytes too low."""
    torch.set_num_threads(1)
    if sys.platform == "linux":  # others cannot set the mark back, and say so
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def counted_late() -> int:
    """The most bytes by which the difference of two marks may be too low: each core adds up its pages of three kinds
    only when it has a batch of them (percpu_counter in Linux)."""
    batch = max(32, 2 * (os.cpu_count() or 1))
    return 2 * 3 * batch * os.sysconf("SC_PAGE_SIZE")


def main(path: str, sizes: str) -> int:
    stay_on_one_core()
    module = torch.export.load(path).module()
    inputs = [torch.zeros(size, dtype=getattr(torch, dtype)) for size, dtype in json.loads(sizes)]
    start_again()
    before = high_water()
    with torch.inference_mode():
        for _ in range(3):
            module(*inputs)
    return max(high_water() - before, 0) + counted_late()


if __name__ == "__main__":
    sys.stdout.write(f"{main(*sys.argv[1:])}\n")
