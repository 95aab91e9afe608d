"""Jobs in worker processes of this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from depthfold.core.optional import load
from depthfold.errors import InvalidValue
from depthfold.jobs.base import Job, Outcome, Setup, expect_positive
from depthfold.jobs.crew import drive
from depthfold.jobs.retry import Queue
from depthfold.jobs.staff import Staff

_GPU = re.compile(r"cuda:(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """Runs the jobs in fresh interpreters, each with so many threads, and the setup once in each of them.

    On the CPU there are `workers` of them (None: as many as the usable cores admit). With `devices` such as
    ("cuda:0", "cuda:1") there are `workers_per_device` on each. A worker sees no GPU but its own, which it knows as
    "cuda": so a setup uses "cuda" where `torch.cuda.is_available()` and the CPU otherwise, and works everywhere.

    A worker that dies is replaced. None outlives the run, whether the run ends, is left early, or is killed. Setup and
    payloads travel by cloudpickle, so functions and classes of a script or notebook work; results travel by pickle.
    """

    workers: int | None = None
    threads: int = 1
    devices: tuple[str, ...] = ("cpu",)
    workers_per_device: int = 1

    def __post_init__(self) -> None:
        expect_positive("The number of workers", self.workers, optional=True)
        expect_positive("The number of threads", self.threads)
        expect_positive("The number of workers per device", self.workers_per_device)
        if isinstance(self.devices, list):
            object.__setattr__(self, "devices", tuple(self.devices))
        if self.devices == ("cpu",):
            return
        gpus = isinstance(self.devices, tuple) and all(
            isinstance(device, str) and _GPU.fullmatch(device) for device in self.devices
        )
        if not self.devices or not gpus or len(set(self.devices)) < len(self.devices):
            raise InvalidValue(
                f'The devices of worker processes are ("cpu",), or GPUs such as ("cuda:0", "cuda:1"), each named once; '
                f"found {self.devices!r}."
            )
        if self.workers is not None:
            raise InvalidValue(
                f"On GPUs the number of workers follows from workers_per_device; found workers={self.workers}, too. "
                "Leave it out."
            )

    def run(self, setup: Setup, jobs: Sequence[Job]) -> Generator[Outcome, None, None]:
        return self._outcomes(setup, Queue(jobs), self._places())

    def _outcomes(self, setup: Setup, queue: Queue, places: tuple[str, ...]) -> Generator[Outcome, None, None]:
        if queue.done:
            return
        pack = load("cloudpickle", "processes").dumps
        staff = Staff(setup=pack(setup), pack=pack, threads=self.threads, places=places)
        try:
            yield from drive(queue, staff)
            staff.dismiss(staff.workers)
        finally:
            staff.kill()

    def _places(self) -> tuple[str, ...]:
        """For each worker, the GPUs that it sees."""
        if self.devices == ("cpu",):
            return ("",) * (self.workers or max(1, _usable_cores() // self.threads))
        return tuple(map(_visible, self.devices)) * self.workers_per_device


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _visible(device: str) -> str:
    """A GPU of this process, as CUDA_VISIBLE_DEVICES names it: this process may itself see only some of them."""
    number = device.partition(":")[2]
    mine = os.environ.get("CUDA_VISIBLE_DEVICES")
    if mine is None:
        return number
    names = [name.strip() for name in mine.split(",") if name.strip()]
    if int(number) >= len(names):
        raise InvalidValue(
            f"There is no {device}: CUDA_VISIBLE_DEVICES={mine!r} shows {len(names)} to this process. Name one of them."
        )
    return names[int(number)]
