"""A program that prints by how much running an exported module raises the memory of its process, in bytes.

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
    """Return the peak memory of this process in bytes."""
    lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines() if ":" in line)
    return int(lines["VmHWM"].split()[0]) * 1024


def reset_high_water() -> None:
    """Reset the peak to the memory in use now. Otherwise importing PyTorch might have been the peak."""
    try:
        RESET.write_text("5")
    except OSError as error:
        raise SystemExit(f"this system cannot reset the peak memory of a process ({error})") from error


def use_one_core() -> None:
    """Run on one core. Linux counts pages per core and adds them up late, so many cores would lower the peak."""
    torch.set_num_threads(1)
    if sys.platform == "linux":  # other systems fail in reset_high_water()
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def uncounted_bytes() -> int:
    """Return an upper bound of the bytes that the difference of two peaks misses.

    Each core adds up its pages of three kinds only in batches (percpu_counter in Linux).
    """
    batch = max(32, 2 * (os.cpu_count() or 1))
    return 2 * 3 * batch * os.sysconf("SC_PAGE_SIZE")


def main(path: str, sizes: str) -> int:
    use_one_core()
    module = torch.export.load(path).module()
    inputs = [torch.zeros(size, dtype=getattr(torch, dtype)) for size, dtype in json.loads(sizes)]
    reset_high_water()
    before = high_water()
    with torch.inference_mode():
        for _ in range(3):
            module(*inputs)
    return max(high_water() - before, 0) + uncounted_bytes()


if __name__ == "__main__":
    sys.stdout.write(f"{main(*sys.argv[1:])}\n")
