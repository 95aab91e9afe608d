"""The option `pytest --without`: skip tests that need something that this machine does not have."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from collections import Counter

import pytest
import torch

# The names for --without, and whether this machine has them. A GPU may be excluded even if there is one.
HAS = {
    "ray": lambda: importlib.util.find_spec("ray"),
    "openvino": lambda: importlib.util.find_spec("openvino"),
    "playwright": lambda: importlib.util.find_spec("playwright"),
    "matplotlib": lambda: importlib.util.find_spec("matplotlib"),
    "axe_playwright_python": lambda: importlib.util.find_spec("axe_playwright_python"),
    "plotly": lambda: importlib.util.find_spec("plotly"),
    "nbclient": lambda: importlib.util.find_spec("nbclient") and importlib.util.find_spec("ipykernel"),
    "triton": lambda: importlib.util.find_spec("triton"),
    "torch_pruning": lambda: importlib.util.find_spec("torch_pruning"),
    "chromium": lambda: shutil.which("chromium"),
    "cuda": lambda: False,
}
EXCLUDED: set[str] = set()
REASON = "skipped by --without "


def leave_out(names):
    """Exclude these names. Call this before the first test module is imported and before CUDA is initialised."""
    for name in names:
        if HAS[name]():
            raise pytest.UsageError(f"{name} is installed. Remove --without {name}.")
        EXCLUDED.add(name)
    if "cuda" in names:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def needs(*names):
    """Return the mark of a test that needs these. Without --without, the test fails if one is missing."""
    assert HAS.keys() >= set(names), f"--without knows {', '.join(HAS)}, found {names}"
    missing = sorted(EXCLUDED.intersection(names))
    return pytest.mark.skipif(bool(missing), reason=REASON + ", ".join(missing))


def stop_without(name):
    """Skip all tests that use the calling fixture if `name` is excluded."""
    if name in EXCLUDED:
        pytest.skip(REASON + name)


def library(name):
    """Import a module for tests that have the mark. Return None if it is excluded."""
    return None if name.partition(".")[0] in EXCLUDED else importlib.import_module(name)


def devices():
    """Return the devices of this machine."""
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def summary(reasons):
    """Return a line for each excluded name, from the reasons of all skipped tests."""
    counts = Counter(reason.partition(REASON)[2] for reason in reasons if REASON in reason)
    lines = [f"{REASON}{names}: {count} tests" for names, count in sorted(counts.items())]
    return [*lines, f"{REASON}cuda: every case on a GPU"] if "cuda" in EXCLUDED else lines
