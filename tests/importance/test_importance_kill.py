"""measure_importance() in a process that is killed with SIGKILL during a training, and resumed in another one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

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
entry.TOGETHER = 3
measure_importance(
    tiny_network(), TinyTask(folder=folder, hold=int(hold)), RECIPE, method=method, executor=eval(executor),
    run=folder + "/run",
)
"""


def results(folder):
    """Return (key, score) of the results in the journal, in their order."""
    lines = (folder / "run" / "importance.jsonl").read_bytes().split(b"\n")[1:-1]
    return [(record["key"], repr(record["result"]["score"])) for record in map(json.loads, lines)]


def kill_during_training(folder, executor, hold, method, workers):
    """Start the process, and kill it when all workers wait in a training."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    command = [sys.executable, "-c", SCRIPT, str(folder), executor, str(hold), method]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}) as process:
        assert eventually(lambda: len(waiting_in(folder)) == workers or process.poll() is not None)
        process.kill()
    assert process.returncode == -signal.SIGKILL


# When to kill, in scores in the log, including that of the original, and the number of results: one per block and the
# original. With "local", the five blocks that change nothing have the result of the original, and the others are
# trained in groups of three.
CASES = [
    pytest.param("Processes(workers=2)", 2, "trained", 8, len(ACTIVATIONS) + 1, marks=pytest.mark.slow),
    ("InProcess()", 1, "local", 8, len(ACTIVATIONS) + 1 - 5),
]


@pytest.mark.parametrize(("executor", "workers", "method", "hold", "number"), CASES, ids=["two workers", "groups"])
def test_killed_measurement_gives_the_same_table_and_trains_nothing_twice(
    tmp_path, executor, workers, method, hold, number
):
    kill_during_training(tmp_path, executor, hold, method, workers)
    recorded = results(tmp_path)
    assert 0 < len(recorded) < number - 1
    task = TinyTask(folder=str(tmp_path))
    table = measure_importance(tiny_network(), task, RECIPE, method=method, run=tmp_path / "run")
    assert table == measure_importance(tiny_network(), TinyTask(), RECIPE, method=method)
    assert results(tmp_path)[: len(recorded)] == recorded
    assert len(dict(results(tmp_path))) == len(results(tmp_path)) == number
    times = scores_in(tmp_path)
    assert {times[score] for _, score in recorded} == {1}
    # When it was killed, each worker may have computed a score that was not yet on disk.
    assert number <= sum(times.values()) <= number + 2 * workers
