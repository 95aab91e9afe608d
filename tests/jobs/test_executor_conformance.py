"""Every executor passes the conformance suite; executors with a fault do not. (test_ray.py tests Ray.)"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import pytest

from depthfold.jobs import Failure, InProcess, Outcome, Processes
from depthfold.testing import check_executor


def test_in_process_conforms():
    check_executor(InProcess(), isolated=False)


@pytest.mark.parametrize("workers", [1, 2])
def test_processes_conform(workers):
    check_executor(Processes(workers=workers))


@dataclass(frozen=True)
class Faulty:
    """InProcess with one fault."""

    fault: str

    def run(self, setup, jobs):
        if self.fault == "takes duplicates":
            jobs = list({job.key: job for job in jobs}.values())
        if self.fault == "setup per job":
            return self._one_by_one(setup, jobs)
        if self.fault == "runs twice":
            jobs = [*jobs, *(replace(job, key=f"{job.key} again") for job in jobs[:1])]
        return self._changed(InProcess().run(setup, jobs))

    def _one_by_one(self, setup, jobs):
        for job in jobs:
            yield from InProcess().run(setup, [job])

    def _changed(self, outcomes):
        if self.fault == "setup swallowed":
            with contextlib.suppress(Exception):
                yield from outcomes
            return
        previous = None
        for number, outcome in enumerate(outcomes):
            if self.fault == "loses a job" and number == 1:
                continue
            if self.fault == "mixes keys" and previous is not None and number == 1:
                outcome = replace(outcome, result=previous.result)
            if self.fault == "runs twice":
                outcome = replace(outcome, key=outcome.key.removesuffix(" again"))
            if self.fault == "raises on failure" and outcome.failure:
                raise RuntimeError("a job failed")
            if self.fault == "all failures alike" and outcome.failure:
                outcome = replace(outcome, failure=Failure(kind="error", message="failed"))
            if self.fault == "counts no attempts":
                outcome = replace(outcome, attempts=1)
            if self.fault == "no clock":
                outcome = replace(outcome, seconds=float("nan"))
            previous = outcome
            yield outcome
        if self.fault == "one too many":
            yield Outcome(key="unknown")


FAULTS = {
    "loses a job": "there is no outcome for 'plain 1'",
    "runs twice": "there are 2 outcomes for 'plain 0'",
    "mixes keys": "'plain 1' has a different result than the work returns when it is called directly",
    "one too many": "outcomes of unknown jobs: ['unknown']",
    "takes duplicates": "must raise InvalidValue, but returned",
    "setup per job": "workers must be reused: there were 22 setups for 22 jobs",
    "setup swallowed": "setup: must raise DepthfoldError, but returned []",
    "raises on failure": "failures: raised RuntimeError: a job failed",
    "all failures alike": "'nan' must fail as 'not finite' after 1 attempts",
    "counts no attempts": "was run 2 times, but reports 1 attempts",
    "no clock": "took nan seconds",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_suite_finds_the_fault(fault):
    with pytest.raises(AssertionError, match="does not conform") as caught:
        check_executor(Faulty(fault), isolated=False)
    assert FAULTS[fault] in str(caught.value)


def test_executor_without_fault_conforms():
    check_executor(Faulty("none"), isolated=False)


class RetriesImmediately:
    """Retries jobs immediately, beside the others."""

    def run(self, setup, jobs):
        with contextlib.suppress(StopIteration):
            for job in jobs:
                outcome = next(InProcess().run(setup, [job]))
                yield outcome


class LeavesWorkers:
    """Leaves its workers running when it is closed."""

    left = ()

    def run(self, setup, jobs):
        inner = Processes(workers=1).run(setup, jobs)
        self.left = (*self.left, inner)  # it is not closed
        yield from iter(lambda: next(inner, None), None)


def test_suite_finds_a_retry_beside_other_jobs():
    with pytest.raises(AssertionError, match="'too large 0' ran out of memory and must run alone after all others"):
        check_executor(RetriesImmediately(), isolated=False)


@pytest.mark.slow
def test_suite_finds_workers_that_are_left_running():
    executor = LeavesWorkers()
    text = r"closed early: processes \[\d+\] are still running after the generator was closed"
    with pytest.raises(AssertionError, match=text):
        check_executor(executor)
    for inner in executor.left:
        inner.close()
