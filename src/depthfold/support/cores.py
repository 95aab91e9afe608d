"""The number of cores that this process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Return the number of cores, without those that the system keeps from this process (taskset, containers)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
