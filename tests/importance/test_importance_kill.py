"""measure_importance() in a process that is killed with SIGKILL during a training, twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from depthfold.core import ImportanceTable
from depthfold.importance import measure_importance
from patience import eventually
from tiny_importance import ACTIVATIONS, RECIPE, TinyTask, scores_in, tiny_network, waiting_in

SCRIPT = """
import sys
import torch
torch.set_num_threads(1)
from depthfold.importance import measure_importance
from depthfold.jobs import InProcess, Processes
from tiny_importance import RECIPE, TinyTask, tiny_network

folder, executor, hold = sys.argv[1:]
task = TinyTask(folder=folder, hold=int(hold) if hold else None)
table = measure_importance(tiny_network(), task, RECIPE, executor=eval(executor), run=folder + "/run")
print(table.dumps())
"""


def start(folder, executor, hold):
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    command = [sys.executable, "-c", SCRIPT, str(folder), executor, hold]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})


def results(folder):
    """Return (key, score) of the results in the journal, in their order."""
    lines = (folder / "run" / "importance.jsonl").read_bytes().split(b"\n")[1:-1]
    return [(record["key"], repr(record["result"]["score"])) for record in map(json.loads, lines)]


def kill_during_training(folder, executor, hold, workers):
    """Start the process, and kill it when all workers wait in a training."""
    before = waiting_in(folder)
    with start(folder, executor, hold) as process:
        assert eventually(lambda: len(waiting_in(folder) - before) == workers or process.poll() is not None)
        process.kill()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(("executor", "workers"), [("InProcess()", 1), ("Processes(workers=2)", 2)])
def test_killed_measurement_gives_the_same_table_and_trains_nothing_twice(tmp_path, executor, workers):
    recorded = []
    for hold in ("5", "11"):  # scores in the log, including that of the original
        kill_during_training(tmp_path, executor, hold, workers)
        assert results(tmp_path)[: len(recorded)] == recorded
        assert len(recorded) < len(results(tmp_path)) < len(ACTIVATIONS)
        recorded = results(tmp_path)
    with start(tmp_path, executor, "") as process:
        table = ImportanceTable.loads(process.stdout.read())
    assert table == measure_importance(tiny_network(), TinyTask(), RECIPE)
    assert results(tmp_path)[: len(recorded)] == recorded
    assert len(dict(results(tmp_path))) == len(results(tmp_path)) == len(ACTIVATIONS) + 1
    times = scores_in(tmp_path)
    assert {times[score] for _, score in recorded} == {1}
    # When it was killed, each worker may have computed a score that was not yet on disk.
    assert len(ACTIVATIONS) + 1 <= sum(times.values()) <= len(ACTIVATIONS) + 1 + 2 * workers
