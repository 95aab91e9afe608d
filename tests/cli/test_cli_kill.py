"""`depthfold compress` killed with -9 in every stage and run again: it resumes, to the same result bit for bit."""

import itertools
import json
import os
import signal
import subprocess
import sys
import tomllib
from dataclasses import dataclass

import pytest

from depthfold.core import SolvedPlan

# The command line in processes that kill themselves when they sync a certain file for the n-th time. Every stage ends
# with a sync, and that is the worst moment: the bytes are written, but the file is not complete yet. All of them are
# forks of one process that has imported the libraries, which takes longer than a run.
SCRIPT = """
import importlib, json, os, signal, sys
import torch._dynamo, torch.export
import accelerate
import depthfold.settings.stages
from depthfold.cli import main

importlib.import_module("depthfold.latency.profile").peak_memory = lambda *_: (None, "not measured in these tests")
sync = os.fsync


def run(name, number, output, *arguments):
    def fsync(handle):
        nonlocal number
        if name and name in os.readlink(f"/proc/self/fd/{handle}"):
            number -= 1
            if number == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        sync(handle)

    os.fsync = fsync
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell makes its background jobs ignore Ctrl-C
    for stream, end in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{output}.{end}", os.O_CREAT | os.O_WRONLY), stream)
    sys.argv = ["depthfold", *arguments]
    main()


for line in sys.stdin:
    if not (child := os.fork()):
        run(*json.loads(line))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
# In the order of the stages: each kill happens in the run that the previous kill left.
STAGES = (
    ("run.json.partial", 1),
    ("latency.jsonl", 9),
    ("latency.json.partial", 1),
    ("run.json.partial", 1),
    ("importance.jsonl", 3),
    ("importance.json.partial", 1),
    ("run.json.partial", 1),
    ("plan.json.partial", 1),
    ("run.json.partial", 1),
    ("last.safetensors.partial", 2),
    ("result", 1),
    ("run.json.partial", 1),
    (".model.pt2.partial", 1),
    ("profiles.json.partial", 1),
    ("findings.json.partial", 1),
    ("report.html.partial", 1),
)


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Return a function that runs the command line in a process that is killed as given, and waits for it."""
    folder, numbers = tmp_path_factory.mktemp("output"), itertools.count()
    # One thread, as in this process: sums in another order differ in their last bits.
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables) as parent:

        def run(name, number, *arguments):
            output = folder / str(next(numbers))
            print(json.dumps([name, number, str(output), *map(str, arguments)]), file=parent.stdin, flush=True)
            returncode = int(parent.stdout.readline())
            return Done(returncode, *(output.with_suffix(end).read_text() for end in (".out", ".err")))

        yield run
        parent.stdin.close()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kill needs /proc, which only Linux has")
def test_a_run_killed_in_every_stage_resumes_to_the_same_result(start, workshop, compressed, tmp_path):
    run, whole = tmp_path / "killed", workshop / "whole"
    first = ("compress", "--config", workshop / "tiny.toml", "--run", run)
    for name, number in STAGES:
        done = start(name, number, *first)
        assert done.returncode == -signal.SIGKILL, f"not killed at {name}: {done.stderr}"
    done = start("", 0, "compress", "--run", run)
    assert done.returncode == 0, done.stderr
    assert "x as fast" in done.stdout
    plans = [SolvedPlan.loads((folder / "plan.json").read_text()) for folder in (run, whole)]
    assert plans[0] == plans[1]
    for name in ("result/model.safetensors", "latency.json", "importance.json"):
        assert (run / name).read_bytes() == (whole / name).read_bytes(), name


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kill needs /proc, which only Linux has")
def test_a_killed_compress_after_inspect_resumes_with_the_run_alone(start, workshop, tmp_path):
    """inspect has written settings of its own, among them another method."""
    run, config = tmp_path / "run", workshop / "tiny.toml"
    (tmp_path / "inspected.toml").write_text(f'model = "{workshop}/net.py:model"\ntarget = "cost_model"\n')
    inspected = ("inspect", "--config", tmp_path / "inspected.toml", "--input", "1x8x8", "--run", run)
    assert start("", 0, *inspected).returncode == 0
    done = start("importance.jsonl", 3, "compress", "--config", config, "--method", "local", "--run", run)
    assert done.returncode == -signal.SIGKILL
    done = start("", 0, "compress", "--run", run)
    assert done.returncode == 0, done.stderr
    assert tomllib.loads((run / "config.toml").read_text())["method"] == "local"


def test_an_interrupted_run_says_how_to_resume(start, workshop, tmp_path):
    """The user's loss sends a real SIGINT while importances are measured, as a terminal would."""
    (tmp_path / "net.py").write_text(
        (workshop / "net.py").read_text()
        + """

import os, signal
from depthfold.training import FunctionTask


def interrupted():
    task = data()

    def loss(model, step):
        os.kill(os.getpid(), signal.SIGINT)
        return task.loss(model, step)

    return FunctionTask(loss=loss, score=task.score, epoch_steps=4)
"""
    )
    arguments = ("--config", workshop / "tiny.toml", "--data", f"{tmp_path / 'net.py'}:interrupted", "--input", "1x8x8")
    done = start("", 0, "compress", *arguments, "--run", tmp_path / "run")
    assert done.returncode == 130
    *progress, last = done.stderr.splitlines()
    assert last == "Interrupted: run the same command again to resume."
    assert progress[-1] == "blocks: 0 of 4"
