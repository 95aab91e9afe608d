"""measure_importance() in a process of its own that is killed with -9 in the middle of a training, twice."""

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
from tiny_importance import RECIPE, STANDS, TinyTask, scores_in, tiny_network, waiting_in

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
    """(key, score) of what is kept, in the order in which it came."""
    lines = (folder / "run" / "importance.jsonl").read_bytes().split(b"\n")[1:-1]
    return [(record["key"], repr(record["result"]["score"])) for record in map(json.loads, lines)]


def kill_in_the_middle(folder, executor, hold, workers):
    """Start it, and kill it when it has so many scores and all workers are in a training."""
    before = waiting_in(folder)
    with start(folder, executor, hold) as process:
        assert eventually(lambda: len(waiting_in(folder) - before) == workers or process.poll() is not None)
        process.kill()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(("executor", "workers"), [("InProcess()", 1), ("Processes(workers=2)", 2)])
def test_killed_twice_the_table_is_the_same_and_nothing_that_was_kept_is_trained_again(tmp_path, executor, workers):
    kept = []
    for hold in ("5", "11"):  # scores in the log, that of the original among them
        kill_in_the_middle(tmp_path, executor, hold, workers)
        assert results(tmp_path)[: len(kept)] == kept
        assert len(kept) < len(results(tmp_path)) < len(STANDS)
        kept = results(tmp_path)
    with start(tmp_path, executor, "") as process:
        table = ImportanceTable.loads(process.stdout.read())
    assert table == measure_importance(tiny_network(), TinyTask(), RECIPE)
    assert results(tmp_path)[: len(kept)] == kept
    assert len(dict(results(tmp_path))) == len(results(tmp_path)) == len(STANDS) + 1
    times = scores_in(tmp_path)
    assert {times[score] for _, score in kept} == {1}
    # At a kill, a score may have been taken that was not on disk yet: one for each worker.
    assert len(STANDS) + 1 <= sum(times.values()) <= len(STANDS) + 1 + 2 * workers
