"""An executor that runs jobs on a Ray cluster."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from depthfold.errors import InvalidValue
from depthfold.jobs.base import Job, Outcome, Setup
from depthfold.jobs.pool import Event, Finished, Lost, Queue, Ready, pack_setup, run_jobs, setup_error
from depthfold.jobs.worker import Worker, environment_variables
from depthfold.support.coerce import as_float, as_whole
from depthfold.support.optional import load
from depthfold.support.text import one_line

_POLL_SECONDS = 2.0  # how often the size of the cluster is checked, because it may grow


@dataclass(frozen=True, slots=True, kw_only=True)
class RayCluster:
    """Runs the jobs in Ray actors, each with the given CPUs, GPUs (a fraction shares one) and threads.

    Each actor runs the setup once. If Ray is already initialised, it is used and left running. Otherwise it is
    initialised with `address` (None: a running cluster if Ray finds one, otherwise a new one on this machine; "local":
    a new one) and shut down afterwards. With `workers=None` there are as many workers as fit on the nodes at that
    moment; the number follows the size of the cluster. A fixed number also makes an autoscaling cluster grow.

    The nodes need depthfold and everything that the setup imports; `runtime_env` lets Ray install them. An actor
    without a GPU sees none, so a setup should use "cuda" if `torch.cuda.is_available()`, and otherwise the CPU.
    """

    address: str | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    workers: int | None = None
    threads: int = 1
    runtime_env: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.workers is not None:
            as_whole("The number of workers", self.workers, InvalidValue)
        as_whole("The number of threads", self.threads, InvalidValue)
        cpus, gpus = (as_float(f"{name} of a worker", getattr(self, name), InvalidValue) for name in ("cpus", "gpus"))
        if not (0 <= cpus < math.inf and 0 <= gpus < math.inf and cpus + gpus > 0):
            raise InvalidValue(
                f"A worker on a Ray cluster needs CPUs or GPUs, found cpus={self.cpus} and gpus={self.gpus}. Both must "
                "be 0 or more, and at least one above 0."
            )

    def run(self, setup: Setup, jobs: Sequence[Job]) -> Generator[Outcome, None, None]:
        return self._outcomes(setup, Queue(jobs))

    def _outcomes(self, setup: Setup, queue: Queue) -> Generator[Outcome, None, None]:
        if queue.done:
            return
        ray = load("ray", "ray")
        with _connected(ray, self.address):
            actors = _ActorPool(ray, self, setup)
            try:
                yield from run_jobs(queue, actors)
            finally:
                actors.stop(actors.workers)


@contextlib.contextmanager
def _connected(ray: Any, address: str | None) -> Iterator[None]:
    if ray.is_initialized():
        yield
        return
    ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


class _ActorPool:
    """A pool of Ray actors, each with at most one pending call."""

    def __init__(self, ray: Any, options: RayCluster, setup: Setup) -> None:
        self._ray, self._options = ray, options
        if options.workers is None and not self._capacity():
            found = ray.cluster_resources()
            raise InvalidValue(
                f"No node of the Ray cluster has room for a worker of {options.cpus:g} CPUs and {options.gpus:g} GPUs; "
                f"the cluster has {found.get('CPU', 0):g} CPUs and {found.get('GPU', 0):g} GPUs in total. "
                "Use smaller workers, or set workers=... to wait for more nodes."
            )
        self._setup = ray.put(pack_setup(self.pack, setup))  # once for all actors
        self._actor = ray.remote(Worker).options(
            num_cpus=options.cpus,
            num_gpus=options.gpus,
            max_restarts=0,  # a restarted actor would have no work; we retry jobs ourselves
            max_task_retries=0,
            runtime_env=dict(options.runtime_env) if options.runtime_env else None,
        )
        self._calls: dict[Any, Any] = {}  # pending call -> actor
        self.workers: list[Any] = []

    def size(self) -> int:
        return self._options.workers or self._capacity()

    def _capacity(self) -> int:
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return sum(workers_on_node(node, cpus=self._options.cpus, gpus=self._options.gpus) for node in nodes)

    def start(self) -> Any:
        actor = self._actor.remote()
        variables = environment_variables(self._options.threads, None if self._options.gpus else "")
        self._calls[actor.prepare.remote(self._setup, self._options.threads, variables)] = actor
        self.workers.append(actor)
        return actor

    def pack(self, payload: Any) -> bytes:
        return self._ray.cloudpickle.dumps(payload)  # type: ignore[no-any-return]

    def submit(self, worker: Any, payload: bytes) -> None:
        self._calls[worker.attempt.remote(payload)] = worker

    def events(self) -> Iterator[Event]:
        # A result counts when it has arrived here: if it is lost together with its node, the worker is lost.
        ready, _ = self._ray.wait(list(self._calls), num_returns=1, timeout=_POLL_SECONDS, fetch_local=True)
        for call in ready:
            actor = self._calls.pop(call)
            try:
                result = self._ray.get(call)
            except self._ray.exceptions.RayError as error:
                self.stop((actor,))  # it may only be unreachable, and must not continue
                yield lost_actor(actor, error)
                continue
            if isinstance(result, str):
                raise setup_error(result)
            yield Ready(worker=actor) if result is None else Finished(worker=actor, attempt=result)

    def stop(self, workers: Iterable[Any]) -> None:
        for actor in tuple(workers):
            self._calls = {call: other for call, other in self._calls.items() if other is not actor}
            self.workers = [other for other in self.workers if other is not actor]
            self._ray.kill(actor)


def workers_on_node(node: Mapping[str, float], *, cpus: float, gpus: float) -> int:
    """Return the number of workers that fit on an otherwise unused node."""
    needed = {"CPU": cpus, "GPU": gpus}
    # The small number corrects rounding errors, such as those of 1 / 0.1.
    return min(int(node.get(name, 0) / share + 1e-6) for name, share in needed.items() if share)


def lost_actor(worker: Any, error: Exception) -> Lost:
    """Convert Ray's error for a failed call to an event, without Ray's identifiers."""
    lines = [line for line in str(error).splitlines() if not line.startswith("\t")]
    reason = f"{type(error).__name__}: {one_line(Exception(' '.join(lines)))}"
    if type(error).__name__ == "OutOfMemoryError":  # Ray kills workers before the kernel does
        return Lost(worker=worker, reason=reason, kind="out of memory")
    return Lost(worker=worker, reason=reason)
