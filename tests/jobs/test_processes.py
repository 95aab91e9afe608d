"""The executor Processes: lost workers, GPUs, options, and that no worker outlives the run."""

import ctypes
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing

import pytest
import torch

from depthfold.errors import DepthfoldError, InvalidValue, MissingDependency
from depthfold.jobs import InProcess, Job, Processes, RayCluster
from depthfold.testing.executors import alive
from patience import eventually


def run(executor, work, payloads):
    jobs = [Job(key=str(n), payload=payload) for n, payload in enumerate(payloads)]
    return {outcome.key: outcome for outcome in executor.run(lambda: work, jobs)}


ENDS = {
    "kill": (
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        "its process was ended by SIGKILL (signal 9), which the kernel",
    ),
    "exit": (lambda: os._exit(7), "its process ended with exit code 7"),
    "sys.exit": (lambda: sys.exit(5), "its process ended with exit code 5"),
    "segfault": (lambda: ctypes.string_at(0), "its process was ended by SIGSEGV (signal 11)"),
    "real time": (lambda: os.kill(os.getpid(), 40), "(signal 40)"),
}


def test_failure_describes_how_the_worker_ended():
    outcomes = run(Processes(workers=2), lambda key: ENDS[key][0]() if key in ENDS else key, [*ENDS, "fine"])
    for number, (_, text) in enumerate(ENDS.values()):
        outcome = outcomes[str(number)]
        assert (outcome.failure.kind, outcome.attempts) == ("worker lost", 3)
        assert text in outcome.failure.message
    assert outcomes["5"].result == "fine"


def test_lost_worker_is_detected_if_its_child_holds_the_pipe():
    def work(_):
        if os.fork() == 0:
            time.sleep(600)
        os._exit(4)

    outcomes = run(Processes(workers=1), work, [None])
    assert outcomes["0"].failure.message == "its process ended with exit code 4"


def test_processes_started_by_a_worker_end_with_it(tmp_path):
    def work(_):
        child = subprocess.Popen(["sleep", "600"])
        (tmp_path / "child").write_text(str(child.pid))

    run(Processes(workers=1), work, [None])
    child = int((tmp_path / "child").read_text())
    assert eventually(lambda: not alive(child))


def test_workers_have_their_own_threads_and_see_no_gpu():
    def work(_):
        import torch

        return os.environ["OMP_NUM_THREADS"], os.environ["CUDA_VISIBLE_DEVICES"], torch.get_num_threads()

    assert run(Processes(workers=1, threads=2), work, [None])["0"].result == ("2", "", 2)


def test_each_gpu_has_its_own_workers(monkeypatch, tmp_path):
    def work(_):  # each waits for all others; otherwise one might take all jobs
        (tmp_path / str(os.getpid())).touch()
        while len(list(tmp_path.iterdir())) < 4:
            time.sleep(0.01)
        return os.environ["CUDA_VISIBLE_DEVICES"]

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-abc")
    executor = Processes(devices=("cuda:0", "cuda:1"), workers_per_device=2)
    found = run(executor, work, [None] * 4)
    assert sorted(outcome.result for outcome in found.values()) == ["5", "5", "GPU-abc", "GPU-abc"]
    with pytest.raises(
        InvalidValue, match=r"There is no cuda:2: this process sees 2 GPUs \(CUDA_VISIBLE_DEVICES='5, GPU-abc'"
    ):
        Processes(devices=("cuda:2",)).run(lambda: work, [])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert run(Processes(devices=("cuda:3",)), lambda _: os.environ["CUDA_VISIBLE_DEVICES"], [0])["0"].result == "3"


def test_lost_worker_is_replaced_on_the_same_gpu(tmp_path, monkeypatch):
    def work(number):
        if number == 0 and not (tmp_path / "died").exists():
            (tmp_path / "died").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
            os._exit(1)
        if number:
            while not (tmp_path / "again").exists():  # keep the other GPU busy
                time.sleep(0.01)
        (tmp_path / "again").touch()
        return os.environ["CUDA_VISIBLE_DEVICES"]

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    found = run(Processes(devices=("cuda:0", "cuda:1")), work, [0, 1])
    assert found["0"].result == (tmp_path / "died").read_text() != found["1"].result


def test_spoiled_worker_gets_no_further_job():
    def setup():
        calls = []

        def work(number):
            calls.append(number)
            if number == 1:
                raise RuntimeError("CUDA error: device-side assert triggered")
            return calls

        return work

    jobs = [Job(key=str(n), payload=n) for n in range(4)]
    found = {o.key: o for o in Processes(workers=1).run(setup, jobs)}
    assert found["0"].result == [0]
    assert (found["1"].failure.kind, found["1"].attempts) == ("error", 1)
    assert [found["2"].result, found["3"].result] == [[2], [2, 3]]


def test_payload_that_cannot_be_pickled_fails_only_its_job():
    found = run(Processes(workers=1), lambda payload: 1, [1, sys.stdout, 2])
    assert found["1"].failure.kind == "error"
    assert "cannot pickle" in found["1"].failure.message
    assert found["0"].result == found["2"].result == 1


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Processes(workers=0), r"The number of workers must be an integer of at least 1, found 0\."),
        (lambda: Processes(workers="2"), r"The number of workers must be an integer of at least 1, found '2'\."),
        (lambda: Processes(workers=1.5), r"The number of workers must be an integer of at least 1, found 1\.5\."),
        (lambda: Processes(threads=0), r"The number of threads must be an integer of at least 1, found 0\."),
        (lambda: Processes(threads=None), r"The number of threads must be an integer of at least 1, found None\."),
        (lambda: InProcess(threads=-1), r"The number of threads must be an integer of at least 1, found -1\."),
        (lambda: Processes(workers_per_device=0), "workers per device must be an integer of at least 1, found 0"),
        (lambda: Processes(devices="cuda:0"), "found 'cuda:0'"),
        (lambda: Processes(devices=(0, 1)), r"found \(0, 1\)"),
        (lambda: RayCluster(workers="2"), r"The number of workers must be an integer of at least 1, found '2'\."),
        (lambda: RayCluster(cpus="1"), r"^cpus of a worker must be a number, found '1'\.$"),
        (lambda: Processes(devices=()), r"different GPUs .* found \(\)"),
        (lambda: Processes(devices=("cuda",)), r'GPUs such as \("cuda:0", "cuda:1"\); found \(\'cuda\',\)'),
        (lambda: Processes(devices=("cpu", "cuda:0")), "different GPUs such as"),
        (lambda: Processes(devices=("cuda:0", "cuda:0")), "different GPUs such as"),
        (
            lambda: Processes(devices=("cuda:0",), workers=2),
            "workers=2 cannot be combined with GPUs. Use workers_per_device",
        ),
    ],
)
def test_invalid_options_are_refused(make, text):
    with pytest.raises(InvalidValue, match=text):
        make()


def test_devices_may_be_a_list():
    assert Processes(devices=["cuda:0", "cuda:1"]) == Processes(devices=("cuda:0", "cuda:1"))


def test_repeated_keys_are_refused_before_the_first_outcome():
    twice = [Job(key="a", payload=1)] * 2
    for executor in (InProcess(), Processes()):
        with pytest.raises(InvalidValue, match="Several jobs have the key 'a'"):
            executor.run(lambda: print, twice)


def test_missing_cloudpickle_is_explained(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    text = r"cloudpickle is not installed. In a clone of depthfold, run: pip install -e .\.\[processes\]."
    with pytest.raises(MissingDependency, match=text):
        run(Processes(workers=1), print, [1])


def test_failing_setup_gives_the_reason():
    def setup():
        raise FileNotFoundError("no such dataset")

    with pytest.raises(DepthfoldError, match="The setup of the jobs failed: FileNotFoundError: no such dataset"):
        list(Processes(workers=2).run(setup, [Job(key="a", payload=1)]))


def test_setup_with_a_parametrised_module_is_explained():
    module = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2))
    said = r"state_dict\(\).*\. Remove the parametrizations first \(torch\.nn\.utils\.parametrize\.remove_par.*, or use"
    with pytest.raises(DepthfoldError, match=said):
        list(Processes(workers=1).run(lambda: module, [Job(key="a", payload=1)]))


def test_setup_that_cannot_be_pickled_is_explained():
    """A dataset may hold a connection."""
    opened = sqlite3.connect(":memory:")
    with closing(opened), pytest.raises(DepthfoldError) as error:
        list(Processes(workers=1).run(lambda: opened.execute, [Job(key="a", payload=1)]))
    assert str(error.value) == (
        "The setup of the jobs cannot be sent to a worker: TypeError: cannot pickle 'sqlite3.Connection' object. Open "
        "files and connections on first use in the dataset's __getitem__, or use the executor InProcess (inline)."
    )


def test_error_in_the_caller_ends_the_workers(tmp_path):
    def work(number):
        (tmp_path / str(os.getpid())).touch()
        while number:
            time.sleep(0.05)

    jobs = [Job(key=str(n), payload=n) for n in range(3)]
    with pytest.raises(ZeroDivisionError), closing(Processes(workers=2).run(lambda: work, jobs)) as outcomes:
        for _ in outcomes:
            raise ZeroDivisionError
    workers = [int(file.name) for file in tmp_path.iterdir()]
    assert workers
    assert not any(map(alive, workers))


# A script without an `if __name__ == "__main__"` guard, and with its own functions and classes.
SCRIPT = """
import os, sys, time
from pathlib import Path
from depthfold.jobs import Job, Processes

folder = Path(sys.argv[1])

class Thing:
    def __init__(self, number):
        self.number = number

def setup():
    def work(thing):
        (folder / str(os.getpid())).touch()
        while thing.number and not (folder / "enough").exists():
            time.sleep(0.02)
        return thing.number
    return work

jobs = [Job(key=str(n), payload=Thing(n)) for n in range(3)]
for outcome in Processes(workers=2).run(setup, jobs):
    print(outcome.key, outcome.result, outcome.failure, flush=True)
"""


def script(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "pids").mkdir()
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "pids")]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_handle_ctrl_c,
    ), tmp_path / "pids"


def _handle_ctrl_c():
    """Restore the default for SIGINT, which the background jobs of a shell ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_script_without_main_guard_works(tmp_path):
    process, folder = script(tmp_path)
    assert process.stdout.readline() == "0 0 None\n"
    (folder / "enough").touch()
    rest, errors = process.communicate()
    assert (sorted(rest.splitlines()), errors, process.returncode) == (["1 1 None", "2 2 None"], "", 0)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_worker_ends_with_its_parent_even_during_a_job(tmp_path, how):
    process, folder = script(tmp_path)
    assert process.stdout.readline() == "0 0 None\n"
    assert eventually(lambda: len(list(folder.iterdir())) == 2)  # both are busy
    workers = [int(file.name) for file in folder.iterdir()]
    assert all(map(alive, workers))
    os.killpg(process.pid, how)  # to the whole group, like Ctrl-C in a terminal
    _, errors = process.communicate()
    assert eventually(lambda: not any(map(alive, workers)))
    assert process.returncode == -how
    assert errors.count("Traceback") == (how == signal.SIGINT)  # one from the caller, none from the workers
