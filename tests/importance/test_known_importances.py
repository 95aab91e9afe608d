"""Experiments that go on: the executor that measures only what a table lacks, and results that are forgotten."""

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


def test_forgotten_results_are_removed_and_the_others_stay(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    runs = importlib.import_module("gpu_runs")
    for key in ("one", "two", "three"):
        runs.record(tmp_path, key, {"value": key})
    before = runs.rows(tmp_path)
    runs.forget(tmp_path, ["two", "four"])
    assert runs.rows(tmp_path) == {key: before[key] for key in ("one", "three")}
