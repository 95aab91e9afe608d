"""Worker processes: how they die, what they see, and that none is left."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import closing

import pytest

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
        "its process was ended by SIGKILL (signal 9), as the kernel",
    ),
    "exit": (lambda: os._exit(7), "its process ended with exit code 7"),
    "sys.exit": (lambda: sys.exit(5), "its process ended with exit code 5"),
    "segfault": (lambda: ctypes.string_at(0), "its process was ended by SIGSEGV (signal 11)"),
    "real time": (lambda: os.kill(os.getpid(), 40), "(signal 40)"),
}


def test_each_way_to_die_is_told_in_words():
    outcomes = run(Processes(workers=2), lambda key: ENDS[key][0]() if key in ENDS else key, [*ENDS, "fine"])
    for number, (_, words) in enumerate(ENDS.values()):
        outcome = outcomes[str(number)]
        assert (outcome.failure.kind, outcome.attempts) == ("worker lost", 3)
        assert words in outcome.failure.message
    assert outcomes["5"].result == "fine"


def test_a_lost_worker_is_noticed_although_its_child_holds_the_pipe():
    def work(_):
        if os.fork() == 0:
            time.sleep(600)
        os._exit(4)

    outcomes = run(Processes(workers=1), work, [None])
    assert outcomes["0"].failure.message == "its process ended with exit code 4"


def test_what_a_worker_started_ends_with_it(tmp_path):
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


def test_each_gpu_has_its_workers(monkeypatch, tmp_path):
    def work(_):  # each waits for all to be there, or one of them might take all jobs
        (tmp_path / str(os.getpid())).touch()
        while len(list(tmp_path.iterdir())) < 4:
            time.sleep(0.01)
        return os.environ["CUDA_VISIBLE_DEVICES"]

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-abc")
    executor = Processes(devices=("cuda:0", "cuda:1"), workers_per_device=2)
    found = run(executor, work, [None] * 4)
    assert sorted(outcome.result for outcome in found.values()) == ["5", "5", "GPU-abc", "GPU-abc"]
    with pytest.raises(InvalidValue, match="There is no cuda:2: CUDA_VISIBLE_DEVICES='5, GPU-abc' shows 2 to this"):
        Processes(devices=("cuda:2",)).run(lambda: work, [])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert run(Processes(devices=("cuda:3",)), lambda _: os.environ["CUDA_VISIBLE_DEVICES"], [0])["0"].result == "3"


def test_a_lost_worker_is_replaced_on_its_own_gpu(tmp_path, monkeypatch):
    def work(number):
        if number == 0 and not (tmp_path / "died").exists():
            (tmp_path / "died").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
            os._exit(1)
        if number:
            while not (tmp_path / "again").exists():  # keeps the other GPU
                time.sleep(0.01)
        (tmp_path / "again").touch()
        return os.environ["CUDA_VISIBLE_DEVICES"]

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    found = run(Processes(devices=("cuda:0", "cuda:1")), work, [0, 1])
    assert found["0"].result == (tmp_path / "died").read_text() != found["1"].result


def test_a_spoiled_worker_gets_no_other_job():
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


def test_a_payload_that_cannot_be_pickled_is_the_failure_of_its_job():
    found = run(Processes(workers=1), lambda payload: 1, [1, sys.stdout, 2])
    assert found["1"].failure.kind == "error"
    assert "cannot pickle" in found["1"].failure.message
    assert found["0"].result == found["2"].result == 1


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Processes(workers=0), r"The number of workers must be a whole number from 1 on, found 0\."),
        (lambda: Processes(workers="2"), r"The number of workers must be a whole number from 1 on, found '2'\."),
        (lambda: Processes(workers=1.5), r"The number of workers must be a whole number from 1 on, found 1\.5\."),
        (lambda: Processes(threads=0), r"The number of threads must be a whole number from 1 on, found 0\."),
        (lambda: Processes(threads=None), r"The number of threads must be a whole number from 1 on, found None\."),
        (lambda: InProcess(threads=-1), r"The number of threads must be a whole number from 1 on, found -1\."),
        (lambda: Processes(workers_per_device=0), "workers per device must be a whole number from 1 on, found 0"),
        (lambda: Processes(devices="cuda:0"), "each named once; found 'cuda:0'"),
        (lambda: Processes(devices=0), "each named once; found 0"),
        (lambda: Processes(devices=(0, 1)), r"each named once; found \(0, 1\)"),
        (lambda: RayCluster(workers="2"), r"The number of workers must be a whole number from 1 on, found '2'\."),
        (lambda: RayCluster(cpus="1"), r"^cpus of a worker must be a number, found '1'\.$"),
        (lambda: Processes(devices=()), r"each named once; found \(\)"),
        (lambda: Processes(devices=("cuda",)), r'or GPUs such as \("cuda:0", "cuda:1"\).*found \(\'cuda\',\)'),
        (lambda: Processes(devices=("cpu", "cuda:0")), "each named once; found"),
        (lambda: Processes(devices=("cuda:0", "cuda:0")), "each named once; found"),
        (lambda: Processes(devices=("cuda:0",), workers=2), "follows from workers_per_device; found workers=2, too"),
    ],
)
def test_options_that_make_no_sense(make, text):
    with pytest.raises(InvalidValue, match=text):
        make()


def test_devices_in_a_list_are_as_good():
    assert Processes(devices=["cuda:0", "cuda:1"]) == Processes(devices=("cuda:0", "cuda:1"))


def test_bad_jobs_are_refused_at_the_call():
    twice = [Job(key="a", payload=1)] * 2
    for executor in (InProcess(), Processes()):
        with pytest.raises(InvalidValue, match="Several jobs have the key 'a'"):
            executor.run(lambda: print, twice)


def test_a_missing_cloudpickle_is_explained(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    text = r"cloudpickle is not installed. Install it with: pip install depthfold\[processes\]"
    with pytest.raises(MissingDependency, match=text):
        run(Processes(workers=1), print, [1])


def test_a_setup_that_fails_says_why():
    def setup():
        raise FileNotFoundError("no such dataset")

    with pytest.raises(DepthfoldError, match="The setup of the jobs failed: FileNotFoundError: no such dataset"):
        list(Processes(workers=2).run(setup, [Job(key="a", payload=1)]))


def test_an_error_of_the_caller_ends_the_workers(tmp_path):
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


# A script as users write them: no guard around its main part, functions and classes of its own.
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
        preexec_fn=_heed_ctrl_c,
    ), tmp_path / "pids"


def _heed_ctrl_c():
    """A background job of a shell ignores SIGINT, and so would everything that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_a_script_without_a_guard_works(tmp_path):
    process, folder = script(tmp_path)
    assert process.stdout.readline() == "0 0 None\n"
    (folder / "enough").touch()
    rest, errors = process.communicate()
    assert (sorted(rest.splitlines()), errors, process.returncode) == (["1 1 None", "2 2 None"], "", 0)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_worker_outlives_its_parent_even_while_it_computes(tmp_path, how):
    process, folder = script(tmp_path)
    assert process.stdout.readline() == "0 0 None\n"
    assert eventually(lambda: len(list(folder.iterdir())) == 2)  # both compute
    workers = [int(file.name) for file in folder.iterdir()]
    assert all(map(alive, workers))
    os.killpg(process.pid, how)  # to the whole group, as the terminal's Ctrl-C is
    _, errors = process.communicate()
    assert eventually(lambda: not any(map(alive, workers)))
    assert process.returncode == -how
    assert errors.count("Traceback") == (how == signal.SIGINT)  # the caller's own, and none of the workers
