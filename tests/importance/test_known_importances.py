"""Experiments that go on: the executor that measures only what a table lacks, and results that are forgotten."""

from dataclasses import replace
from typing import get_args

import pytest

from depthfold.core import Move
from depthfold.importance import measure_importance
from depthfold.jobs import InProcess
from experiments import gpu_runs as runs
from experiments.equal_latency.known_importances import Known
from tiny_importance import TinyTask, tiny_network


class Counting:
    def __init__(self):
        self.keys = []

    def run(self, setup, jobs):
        self.keys += [job.key for job in jobs]
        yield from InProcess().run(setup, jobs)


@pytest.mark.filterwarnings("ignore:The hold-out set")
def test_only_the_missing_importances_are_measured():
    given = dict(method="recalibrated", moves=get_args(Move))
    whole = measure_importance(tiny_network(), TinyTask(), **given)
    less = replace(whole, entries=tuple(entry for entry in whole.entries if not entry.dropped.branches))
    counting = Counting()
    found = measure_importance(tiny_network(), TinyTask(), executor=Known(less, counting), **given)
    assert found == whole
    assert 0 < len(counting.keys) == len(whole.entries) - len(less.entries)


def test_forgotten_results_are_removed_and_the_others_stay(tmp_path):
    for key in ("one", "two", "three"):
        runs.record(tmp_path, key, {"value": key})
    before = runs.rows(tmp_path)
    runs.forget(tmp_path, ["two", "four"])
    assert runs.rows(tmp_path) == {key: before[key] for key in ("one", "three")}
