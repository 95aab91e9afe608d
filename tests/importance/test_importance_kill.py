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
from depthfold.importance import entry, measure_importance
from depthfold.jobs import InProcess, Processes
from tiny_importance import RECIPE, TinyTask, tiny_network

folder, executor, hold, method = sys.argv[1:]
task = TinyTask(folder=folder, hold=int(hold) if hold else None)
entry.TOGETHER = 3
table = measure_importance(
    tiny_network(), task, RECIPE, method=method, executor=eval(executor), run=folder + "/run"
)
print(table.dumps())
"""


def start(folder, executor, hold, method):
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    command = [sys.executable, "-c", SCRIPT, str(folder), executor, hold, method]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})


def results(folder):
    """Return (key, score) of the results in the journal, in their order."""
    lines = (folder / "run" / "importance.jsonl").read_bytes().split(b"\n")[1:-1]
    return [(record["key"], repr(record["result"]["score"])) for record in map(json.loads, lines)]


def kill_during_training(folder, executor, hold, method, workers):
    """Start the process, and kill it when all workers wait in a training."""
    before = waiting_in(folder)
    with start(folder, executor, hold, method) as process:
        assert eventually(lambda: len(waiting_in(folder) - before) == workers or process.poll() is not None)
        process.kill()
    assert process.returncode == -signal.SIGKILL


# The number of results: one per block and the original. With "local", the five blocks that change nothing have the
# result of the original, and the others are trained in groups of three.
CASES = [
    ("InProcess()", 1, "trained", len(ACTIVATIONS) + 1),
    ("Processes(workers=2)", 2, "trained", len(ACTIVATIONS) + 1),
    ("InProcess()", 1, "local", len(ACTIVATIONS) + 1 - 5),
]


@pytest.mark.parametrize(("executor", "workers", "method", "number"), CASES)
def test_killed_measurement_gives_the_same_table_and_trains_nothing_twice(tmp_path, executor, workers, method, number):
    recorded = []
    for hold in ("5", "11") if method == "trained" else ("8",):  # scores in the log, including that of the original
        kill_during_training(tmp_path, executor, hold, method, workers)
        assert results(tmp_path)[: len(recorded)] == recorded
        assert len(recorded) < len(results(tmp_path)) < number - 1
        recorded = results(tmp_path)
    with start(tmp_path, executor, "", method) as process:
        table = ImportanceTable.loads(process.stdout.read())
    assert table == measure_importance(tiny_network(), TinyTask(), RECIPE, method=method)
    assert results(tmp_path)[: len(recorded)] == recorded
    assert len(dict(results(tmp_path))) == len(results(tmp_path)) == number
    times = scores_in(tmp_path)
    assert {times[score] for _, score in recorded} == {1}
    # When it was killed, each worker may have computed a score that was not yet on disk.
    assert number <= sum(times.values()) <= number + 2 * workers
