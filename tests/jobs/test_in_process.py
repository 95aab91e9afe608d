"""The executor InProcess: its number of threads, and its lazy imports."""

import subprocess
import sys

import pytest
import torch

from depthfold.errors import SpoiledDevice
from depthfold.jobs import InProcess, Job

JOBS = [Job(key=str(n), payload=n) for n in range(3)]


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_threads_are_set_for_setup_and_work_and_restored_in_between():
    seen = []

    def setup():
        seen.append(torch.get_num_threads())
        return lambda number: 1 / (number - 1) and torch.get_num_threads()

    for outcome in InProcess(threads=2).run(setup, JOBS):
        seen.append(outcome.result)
        assert torch.get_num_threads() == 3
    assert seen == [2, 2, None, 2]  # the second one raises
    assert torch.get_num_threads() == 3


def test_job_starts_after_the_previous_outcome_was_taken():
    started = []
    outcomes = InProcess().run(lambda: started.append, JOBS)
    assert started == []
    next(outcomes)
    assert started == [0]
    outcomes.close()
    assert started == [0]


def test_importing_jobs_imports_no_heavy_library():
    heavy = ("torch", "ray", "cloudpickle", "numpy")
    code = (
        "import sys, depthfold.jobs as jobs; jobs.InProcess(), jobs.Processes(), jobs.RayCluster(); "
        "import depthfold.testing.executors; "
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_unusable_device_ends_the_run_after_the_outcome_of_its_job():
    """All further jobs would fail, and a journal would keep their failures."""

    def work(number):
        if number:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return number

    outcomes = InProcess().run(lambda: work, [Job(key=f"{n}", payload=n) for n in range(3)])
    assert next(outcomes).result == 0
    assert "illegal memory access" in next(outcomes).failure.message
    with pytest.raises(SpoiledDevice, match=r"illegal memory access .* Run the same again: finished jobs are kept\."):
        next(outcomes)
