"""Jobs in this very process, one after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

from depthfold.jobs.base import Job, Outcome, Setup, expect_positive
from depthfold.jobs.pool import Queue, attempt, begin


@dataclass(frozen=True, slots=True, kw_only=True)
class InProcess:
    """Runs the jobs here, with so many threads of PyTorch's. They start when the outcome of the one before was taken.

    No worker can be lost: a job that ends its process (a segmentation fault, the kernel's lack of memory) ends the
    caller, too. Use `Processes` for jobs that are not to be trusted that far.
    """

    threads: int = 1

    def __post_init__(self) -> None:
        expect_positive("The number of threads", self.threads)

    def run(self, setup: Setup, jobs: Sequence[Job]) -> Generator[Outcome, None, None]:
        return self._outcomes(setup, Queue(jobs))  # a function of its own: bad jobs are refused now, not at next()

    def _outcomes(self, setup: Setup, queue: Queue) -> Generator[Outcome, None, None]:
        if queue.done:
            return
        with _torch_threads(self.threads):
            work = begin(setup)
        while (job := queue.take()) is not None:
            with _torch_threads(self.threads):  # not around the yield: the caller's threads are its own affair
                answer = attempt(work, job.payload)
            outcome = queue.answered(job.key, answer)
            if outcome is not None:
                yield outcome


@contextlib.contextmanager
def _torch_threads(number: int) -> Iterator[None]:
    import torch  # here, so that importing depthfold.jobs does not

    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
