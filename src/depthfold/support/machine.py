"""What this machine has: cores and free memory."""

from __future__ import annotations

import os
from pathlib import Path


def usable_cores() -> int:
    """Return the number of cores, without those that the system keeps from this process (taskset, containers)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory() -> int | None:
    """Return the bytes of memory that are free on this machine, None if they are not known."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):  # another system
        return None
