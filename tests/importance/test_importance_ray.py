"""measure_importance() on a Ray cluster of two nodes on this machine, one of which is lost."""

from __future__ import annotations

import json
import os
import sys
import threading

import pytest

from depthfold.importance import measure_importance
from depthfold.jobs import RayCluster
from lacking import library, needs
from patience import eventually
from tiny_importance import (
    ACTIVATIONS,
    RECIPE,
    TinyTask,
    running,
    tiny_network,
    trainings_in,
    waiting_in,
)

ray = library("ray")
pytestmark = needs("ray")

STORE = 100_000_000  # bytes of each node's object store: /dev/shm may be small
NETWORK = tiny_network()
HERE = {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}}  # so that the nodes can import this task


@pytest.fixture(scope="module")
def cluster():
    """Two nodes of one CPU each."""
    node = dict(num_cpus=1, num_gpus=0, object_store_memory=STORE)
    made = library("ray.cluster_utils").Cluster(
        initialize_head=True, head_node_args=node | dict(include_dashboard=False)
    )
    made.second = made.add_node(**node)
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture(scope="module")
def right():
    return measure_importance(NETWORK, TinyTask(), RECIPE, method="trained")


@pytest.mark.slow
def test_two_workers_give_the_same_table_if_a_node_is_lost(cluster, right, tmp_path):
    task, found = TinyTask(folder=str(tmp_path), hold=6), []

    def measure():
        found.append(
            measure_importance(
                NETWORK, task, RECIPE, executor=RayCluster(runtime_env=HERE), run=tmp_path / "run", method="trained"
            )
        )

    caller = threading.Thread(target=measure, daemon=True)
    caller.start()
    assert eventually(lambda: len(waiting_in(tmp_path)) == 2 or not caller.is_alive())
    cluster.remove_node(cluster.second, allow_graceful=False)
    assert eventually(lambda: sum(map(running, waiting_in(tmp_path))) == 1 or not caller.is_alive())
    (tmp_path / "go").touch()
    caller.join()
    assert found == [right]
    lines = (tmp_path / "run" / "importance.jsonl").read_text().splitlines()[1:]
    attempts = {(record := json.loads(line))["key"]: record["attempts"] for line in lines}
    assert len(attempts) == len(lines) == len(ACTIVATIONS) + 1
    assert sorted(attempts.values())[-2:] == [1, 2]  # the job on the lost node ran twice
    assert trainings_in(tmp_path) == len(ACTIVATIONS) + 1
