"""Measure the importance table on a Ray cluster.

    python examples/ray_cluster.py --address auto --gpus 0.25 --run out/ray

Run it on a node of the cluster. Without --address, it starts a cluster on this machine and takes half a minute. If it
is interrupted, run it again: only what is missing is measured. Every node needs depthfold, and the data at the same
path. This example uses the network and the images that ship with depthfold.
"""

from __future__ import annotations

import argparse

import depthfold as df
from depthfold import demo
from depthfold.jobs import RayCluster


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address", default="local", help='the address of the cluster, or "auto"')
    parser.add_argument("--cpus", type=float, default=1.0, help="the CPUs of each worker")
    parser.add_argument("--gpus", type=float, default=0.0, help="the GPUs of each worker; a fraction shares one")
    parser.add_argument("--workers", type=int, help="the number of workers; as many as fit on the nodes by default")
    parser.add_argument("--run", default="out/ray", help="the folder for the tables and their journals")
    parser.add_argument("--blocks", nargs="*", default=["9", "10", "11"], help="the modules that may be merged")
    parser.add_argument("--method", default="recalibrated", help='"trained" is the paper\'s method')
    given = parser.parse_args()

    model, task = demo.model(), demo.task()
    others = [name for name, _ in model.named_children() if given.blocks and name not in given.blocks]
    traced = df.trace(model, task.example(), ignore=others)
    latency = df.measure_latency(traced, "cost_model", run=given.run)
    cluster = RayCluster(address=given.address, cpus=given.cpus, gpus=given.gpus, workers=given.workers)
    recipe = df.Recipe(steps=2, batch=32) if given.method == "recalibrated" else None  # None: that of the method
    importance = df.measure_importance(
        traced, task, recipe, method=given.method, latency=latency, executor=cluster, run=given.run
    )
    print(importance)
    print(df.solve(latency, importance, network=traced.network))


if __name__ == "__main__":
    main()
