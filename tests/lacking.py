"""What this machine lacks, as `pytest --without` says, and the tests that are left out for want of it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from collections import Counter

import pytest
import torch

# What a machine may lack, and whether this one has it. A GPU that is busy is there, and may be left out all the same.
HAS = {
    "ray": lambda: importlib.util.find_spec("ray"),
    "openvino": lambda: importlib.util.find_spec("openvino"),
    "plotly": lambda: importlib.util.find_spec("plotly"),
    "playwright": lambda: importlib.util.find_spec("playwright"),
    "chromium": lambda: shutil.which("chromium"),
    "cuda": lambda: False,
}
LEFT_OUT: set[str] = set()
WORDS = "left out for want of "


def leave_out(names):
    """To be said before the first test module is imported, and before anything asks for a GPU."""
    for name in names:
        if HAS[name]():
            raise pytest.UsageError(f"{name} is installed: leave out --without {name}.")
        LEFT_OUT.add(name)
    if "cuda" in names:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def needs(*names):
    """The mark of a test that needs these. Where one is missing and was not left out, the test fails."""
    assert HAS.keys() >= set(names), f"--without knows {', '.join(HAS)}, found {names}"
    missing = sorted(LEFT_OUT.intersection(names))
    return pytest.mark.skipif(bool(missing), reason=WORDS + ", ".join(missing))


def stop_without(name):
    """For a fixture that needs it: the tests that use the fixture are left out."""
    if name in LEFT_OUT:
        pytest.skip(WORDS + name)


def library(name):
    """The module, for tests that all have the mark; None where they are left out."""
    return None if name.partition(".")[0] in LEFT_OUT else importlib.import_module(name)


def devices():
    """Where a network can be on this machine."""
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def summary(reasons):
    """A line for each thing that is lacking, from the reasons of all tests that were skipped."""
    counts = Counter(reason.partition(WORDS)[2] for reason in reasons if WORDS in reason)
    lines = [f"{WORDS}{names}: {count} tests" for names, count in sorted(counts.items())]
    return [*lines, f"{WORDS}cuda: every case on a GPU"] if "cuda" in LEFT_OUT else lines
