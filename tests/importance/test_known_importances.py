"""The executor of the experiments that measures only what a table lacks."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from depthfold.core import Move
from depthfold.importance import measure_importance
from depthfold.jobs import InProcess
from tiny_importance import TinyTask, tiny_network

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


class Counting:
    def __init__(self):
        self.keys = []

    def run(self, setup, jobs):
        self.keys += [job.key for job in jobs]
        yield from InProcess().run(setup, jobs)


@pytest.mark.filterwarnings("ignore:The hold-out set")
def test_only_the_missing_importances_are_measured(monkeypatch):
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    Known = importlib.import_module("known_importances").Known
    given = dict(method="recalibrated", moves=get_args(Move))
    whole = measure_importance(tiny_network(), TinyTask(), **given)
    less = replace(whole, entries=tuple(entry for entry in whole.entries if not entry.dropped.branches))
    counting = Counting()
    found = measure_importance(tiny_network(), TinyTask(), executor=Known(less, counting), **given)
    assert found == whole
    assert 0 < len(counting.keys) == len(whole.entries) - len(less.entries)
