"""Jobs on a Ray cluster."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from depthfold.errors import InvalidValue
from depthfold.jobs.base import Job, Outcome, Setup, expect_positive
from depthfold.jobs.pool import Answered, Event, Lost, Queue, Ready, drive, setup_failed
from depthfold.jobs.worker import Seat, environment
from depthfold.support.coerce import as_float
from depthfold.support.optional import load
from depthfold.support.text import one_line

_LOOK = 2.0  # seconds after which the cluster is looked at again: it may have grown


@dataclass(frozen=True, slots=True, kw_only=True)
class RayCluster:
    """Runs the jobs in actors, each with so many CPUs, GPUs (a fraction shares one) and threads, and the setup once in
    each of them.

    Ray is used as it is where it has been initialised, and left running. Otherwise it is initialised with `address`
    (None: the cluster that Ray finds, or a new one on this machine; "local": a new one) and shut down afterwards. With
    `workers=None` there are as many as the nodes hold at that time: fewer when a node goes, more when one comes. A
    number asks for as many, which also makes a cluster that can grow do so.

    The nodes need depthfold and whatever the setup imports; `runtime_env` is Ray's way to send them there. An actor
    without a GPU sees none, so a setup uses "cuda" where `torch.cuda.is_available()` and the CPU otherwise.
    """

    address: str | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    workers: int | None = None
    threads: int = 1
    runtime_env: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        expect_positive("The number of workers", self.workers, optional=True)
        expect_positive("The number of threads", self.threads)
        cpus, gpus = (as_float(f"{name} of a worker", getattr(self, name), InvalidValue) for name in ("cpus", "gpus"))
        if not (0 <= cpus < math.inf and 0 <= gpus < math.inf and cpus + gpus > 0):
            raise InvalidValue(
                f"A worker on a Ray cluster takes CPUs or GPUs or both; found cpus={self.cpus} and gpus={self.gpus}. "
                "Both are 0 or more, and one of them above 0."
            )

    def run(self, setup: Setup, jobs: Sequence[Job]) -> Generator[Outcome, None, None]:
        return self._outcomes(setup, Queue(jobs))

    def _outcomes(self, setup: Setup, queue: Queue) -> Generator[Outcome, None, None]:
        if queue.done:
            return
        ray = load("ray", "ray")
        with _connected(ray, self.address):
            actors = _Actors(ray, self, setup)
            try:
                yield from drive(queue, actors)
            finally:
                actors.dismiss(actors.workers)


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


class _Actors:
    """A crew of actors. Each has one call under way at most, and each call is listened to until it is answered once."""

    def __init__(self, ray: Any, wanted: RayCluster, setup: Setup) -> None:
        self._ray, self._wanted = ray, wanted
        if wanted.workers is None and not self._capacity():
            raise InvalidValue(
                f"No node of the Ray cluster has room for a worker of {wanted.cpus:g} CPUs and {wanted.gpus:g} GPUs; "
                f"the cluster has {_resources(ray)}. Ask for less, or give workers=... to wait for nodes to come."
            )
        self._setup = ray.put(ray.cloudpickle.dumps(setup))  # once, for all of them
        self._actor = ray.remote(Seat).options(
            num_cpus=wanted.cpus,
            num_gpus=wanted.gpus,
            max_restarts=0,  # a restarted actor would lack its setup; retries are ours
            max_task_retries=0,
            runtime_env=dict(wanted.runtime_env) if wanted.runtime_env else None,
        )
        self._calls: dict[Any, Any] = {}  # what is awaited, and from whom
        self.workers: list[Any] = []

    def size(self) -> int:
        return self._wanted.workers or self._capacity()

    def _capacity(self) -> int:
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return sum(room(node, cpus=self._wanted.cpus, gpus=self._wanted.gpus) for node in nodes)

    def hire(self) -> Any:
        actor = self._actor.remote()
        variables = environment(self._wanted.threads, None if self._wanted.gpus else "")
        self._calls[actor.prepare.remote(self._setup, self._wanted.threads, variables)] = actor
        self.workers.append(actor)
        return actor

    def pack(self, payload: Any) -> bytes:
        return self._ray.cloudpickle.dumps(payload)  # type: ignore[no-any-return]

    def give(self, worker: Any, payload: bytes) -> None:
        self._calls[worker.attempt.remote(payload)] = worker

    def events(self) -> Iterator[Event]:
        # An answer counts once it is here: one that is lost with its node on the way is a lost worker.
        ready, _ = self._ray.wait(list(self._calls), num_returns=1, timeout=_LOOK, fetch_local=True)
        for call in ready:
            actor = self._calls.pop(call)
            try:
                answer = self._ray.get(call)
            except self._ray.exceptions.RayError as error:
                self.dismiss((actor,))  # it may only be out of reach, and must not run on
                yield loss(actor, error)
                continue
            if isinstance(answer, str):
                raise setup_failed(answer)
            yield Ready(worker=actor) if answer is None else Answered(worker=actor, answer=answer)

    def dismiss(self, workers: Iterable[Any]) -> None:
        for actor in tuple(workers):
            self._calls = {call: other for call, other in self._calls.items() if other is not actor}
            self.workers = [other for other in self.workers if other is not actor]
            self._ray.kill(actor)


def room(node: Mapping[str, float], *, cpus: float, gpus: float) -> int:
    """How many workers a node holds if nobody else uses it."""
    asked = {"CPU": cpus, "GPU": gpus}
    # 1 / 0.1 and its like must not be rounded below the whole number that they mean.
    return min(int(node.get(name, 0) / share + 1e-6) for name, share in asked.items() if share)


def loss(worker: Any, error: Exception) -> Lost:
    """What Ray says of a call that was not answered, without the identifiers."""
    lines = [line for line in str(error).splitlines() if not line.startswith("\t")]
    how = f"{type(error).__name__}: {one_line(Exception(' '.join(lines)))}"
    if type(error).__name__ == "OutOfMemoryError":  # Ray ends workers before the kernel would
        return Lost(worker=worker, how=how, kind="out of memory")
    return Lost(worker=worker, how=how)


def _resources(ray: Any) -> str:
    found = ray.cluster_resources()
    return f"{found.get('CPU', 0):g} CPUs and {found.get('GPU', 0):g} GPUs in all"
