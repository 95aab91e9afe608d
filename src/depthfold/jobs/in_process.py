"""An executor that runs jobs in this process, one after another."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

from depthfold.errors import InvalidValue
from depthfold.jobs.base import Job, Outcome, Setup
from depthfold.jobs.pool import Queue, run_attempt, run_setup
from depthfold.support.coerce import as_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class InProcess:
    """Runs the jobs in this process with `threads` PyTorch threads. A job starts when its outcome is requested.

    A job that ends its process (a segmentation fault, the kernel's out-of-memory killer) also ends the caller. Use
    `Processes` for such jobs.
    """

    threads: int = 1

    def __post_init__(self) -> None:
        as_whole("The number of threads", self.threads, InvalidValue)

    def run(self, setup: Setup, jobs: Sequence[Job]) -> Generator[Outcome, None, None]:
        return self._outcomes(setup, Queue(jobs))  # not a generator: invalid jobs raise here, not at the first next()

    def _outcomes(self, setup: Setup, queue: Queue) -> Generator[Outcome, None, None]:
        if queue.done:
            return
        with _torch_threads(self.threads):
            work = run_setup(setup)
        while (job := queue.take()) is not None:
            with _torch_threads(self.threads):  # not around the yield: the caller keeps its own setting
                attempt = run_attempt(work, job.payload)
            outcome = queue.finish(job.key, attempt)
            if outcome is not None:
                yield outcome


@contextlib.contextmanager
def _torch_threads(number: int) -> Iterator[None]:
    import torch  # here, so that importing depthfold.jobs does not import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
