"""The executor RayCluster on a local Ray: the conformance suite, and a cluster that loses a node and gains another."""

import os
import subprocess
import sys
import threading
import time

import pytest

from depthfold.errors import DepthfoldError, InvalidValue, MissingDependency
from depthfold.jobs import Job, RayCluster
from depthfold.jobs.ray_cluster import lost_actor, workers_on_node
from depthfold.testing import check_executor
from depthfold.testing.executors import alive
from lacking import library, needs
from patience import eventually

ray = library("ray")
pytestmark = needs("ray")

STORE = 100_000_000  # bytes of each node's object store: /dev/shm may be small


@pytest.fixture(scope="module")
def cluster():
    """Start a cluster of two nodes, with 2 CPUs each and no GPU, once for all tests."""
    node = dict(num_cpus=2, num_gpus=0, object_store_memory=STORE)
    # A new node may ask the lost one for the setup. By default it asks another one after 10 seconds, then after 20.
    head = dict(include_dashboard=False, _system_config={"object_manager_pull_timeout_ms": 500})
    made = library("ray.cluster_utils").Cluster(initialize_head=True, head_node_args=node | head)
    made.second = made.add_node(**node)
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()


def waiting_setup(folder):
    """Return a setup whose work records where it runs and waits for the file "go"."""

    def setup():
        def work(number):
            node = ray.get_runtime_context().get_node_id()
            (folder / f"{number}.{node}.{os.getpid()}").touch()
            while not (folder / "go").exists():
                time.sleep(0.02)
            return number**2

        return work

    return setup


def recorded(folder):
    """Return (job, node, process) for every attempt so far."""
    return {tuple(file.name.split(".")) for file in folder.glob("*.*")}


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_ray_conforms_and_is_left_running():
    check_executor(RayCluster(workers=2))
    assert ray.is_initialized()
    assert eventually(lambda: ray.available_resources().get("CPU") == 4)  # no actor is left


@pytest.mark.usefixtures("cluster")
def test_worker_larger_than_every_node_is_refused():
    text = "No node of the Ray cluster has room for a worker of 1 CPUs and 1 GPUs; the cluster has 4 CPUs and 0 GPUs"
    with pytest.raises(InvalidValue, match=text):
        list(RayCluster(gpus=1).run(lambda: print, [Job(key="a", payload=1)]))


@pytest.mark.usefixtures("cluster")
def test_workers_have_their_own_threads_and_see_no_gpu():
    def work(_):
        return os.environ["OMP_NUM_THREADS"], os.environ["CUDA_VISIBLE_DEVICES"], os.environ["MARK"]

    executor = RayCluster(workers=1, threads=3, runtime_env={"env_vars": {"MARK": "here"}})
    (outcome,) = executor.run(lambda: work, [Job(key="a", payload=1)])
    assert outcome.result == ("3", "", "here")


@pytest.mark.usefixtures("cluster")
def test_setup_that_cannot_be_pickled_is_explained():
    opened = threading.Lock()
    with pytest.raises(DepthfoldError) as error:
        list(RayCluster(workers=1).run(lambda: opened.acquire, [Job(key="a", payload=1)]))
    assert str(error.value).startswith("The setup of the jobs cannot be sent to a worker: TypeError: cannot pickle ")
    assert str(error.value).endswith(
        ". Open files and connections on first use in the dataset's __getitem__, or use "
        "the executor InProcess (inline)."
    )


def test_run_survives_a_lost_node_and_uses_a_new_one(cluster, tmp_path):
    gone, outcomes = cluster.second.node_id, []
    jobs = [Job(key=f"job {n}", payload=n) for n in range(12)]
    caller = threading.Thread(
        target=lambda: outcomes.extend(RayCluster().run(waiting_setup(tmp_path), jobs)), daemon=True
    )
    caller.start()
    try:
        assert eventually(lambda: len({process for _, _, process in recorded(tmp_path)}) == 4)  # all workers are busy
        cluster.remove_node(cluster.second, allow_graceful=False)
        assert eventually(lambda: not any(alive(int(p)) for _, node, p in recorded(tmp_path) if node == gone))
        new = cluster.add_node(num_cpus=1, object_store_memory=STORE).node_id
        assert eventually(lambda: any(node == new for _, node, _ in recorded(tmp_path)))  # the pool grows again
    finally:
        (tmp_path / "go").touch()
    caller.join()
    assert sorted((o.key, o.result) for o in outcomes) == sorted((job.key, job.payload**2) for job in jobs)
    assert not any(outcome.failure for outcome in outcomes)
    lost = {f"job {job}" for job, node, _ in recorded(tmp_path) if node == gone}
    assert len(lost) == 2
    assert {o.key: o.attempts for o in outcomes} == {job.key: 2 if job.key in lost else 1 for job in jobs}


@pytest.mark.slow
def test_ray_is_started_and_shut_down_if_it_was_not_running():
    code = """
import os, ray
from depthfold.jobs import Job, RayCluster
jobs = [Job(key=str(n), payload=n) for n in range(3)]
outcomes = list(RayCluster(address="local", workers=1).run(lambda: lambda n: (n + 1, os.getpid()), jobs))
print(sorted(outcome.result[0] for outcome in outcomes), ray.is_initialized(), outcomes[0].result[1])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("[1, 2, 3] False "), done.stderr
    assert eventually(lambda: not alive(int(done.stdout.split()[-1])))


@pytest.mark.parametrize(
    ("node", "cpus", "gpus", "number"),
    [
        ({"CPU": 8.0}, 1, 0, 8),
        ({"CPU": 8.0}, 3, 0, 2),
        ({"CPU": 16.0, "GPU": 1.0}, 1, 0.1, 10),
        ({"CPU": 16.0, "GPU": 2.0}, 1, 1 / 3, 6),
        ({"CPU": 2.0, "GPU": 4.0}, 1, 0.5, 2),
        ({"CPU": 2.0, "GPU": 4.0}, 0, 1, 4),
        ({"CPU": 8.0}, 1, 1, 0),
        ({}, 1, 0, 0),
    ],
)
def test_number_of_workers_on_a_node(node, cpus, gpus, number):
    assert workers_on_node(node, cpus=cpus, gpus=gpus) == number


def test_error_of_ray_becomes_a_lost_worker():
    died = lost_actor("worker", ray.exceptions.ActorDiedError())
    assert (died.worker, died.kind) == ("worker", "worker lost")
    assert died.reason == "ActorDiedError: The actor died unexpectedly before finishing this task."
    assert lost_actor("worker", ray.exceptions.OutOfMemoryError("the node ran low")).kind == "out of memory"


@pytest.mark.parametrize("options", [dict(cpus=0), dict(cpus=-1, gpus=2), dict(gpus=float("nan"))])
def test_invalid_options_are_refused(options):
    with pytest.raises(InvalidValue, match="Both must be 0 or more, and at least one above 0"):
        RayCluster(**options)


def test_missing_ray_is_explained(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        MissingDependency, match=r"ray is not installed. In a clone of depthfold, run: pip install -e .\.\[ray\]."
    ):
        list(RayCluster().run(lambda: print, [Job(key="a", payload=1)]))
