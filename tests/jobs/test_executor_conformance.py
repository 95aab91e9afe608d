"""Every executor passes the shipped suite; executors with a fault do not. (Ray has a file of its own.)"""

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
            yield Outcome(key="nobody's")


FAULTS = {
    "loses a job": "there is no outcome for 'plain 1'",
    "runs twice": "there are 2 outcomes for 'plain 0'",
    "mixes keys": "'plain 1' has another result than the work gives when it is called directly",
    "one too many": 'outcomes of jobs that were not asked for: ["nobody\'s"]',
    "takes duplicates": "must raise InvalidValue, and gave",
    "setup per job": "a worker must be used again: there were 22 setups for 22 jobs",
    "setup swallowed": "setup: must raise DepthfoldError, and gave []",
    "raises on failure": "failures: raised RuntimeError: a job failed",
    "all failures alike": "'nan' must fail as 'not finite' after 1 attempts",
    "counts no attempts": "was run 2 times, and is said to have been 1",
    "no clock": "took nan seconds",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault):
    with pytest.raises(AssertionError, match="does not conform") as caught:
        check_executor(Faulty(fault), isolated=False)
    assert FAULTS[fault] in str(caught.value)


def test_without_a_fault_it_conforms():
    check_executor(Faulty("none"), isolated=False)


class Impatient:
    """Tries jobs again at once, beside the others."""

    def run(self, setup, jobs):
        with contextlib.suppress(StopIteration):
            for job in jobs:
                outcome = next(InProcess().run(setup, [job]))
                yield outcome


class Deserter:
    """Leaves its workers running when it is closed."""

    left = ()

    def run(self, setup, jobs):
        inner = Processes(workers=1).run(setup, jobs)
        self.left = (*self.left, inner)  # nobody closes it
        yield from iter(lambda: next(inner, None), None)


def test_a_retry_beside_others_is_found():
    with pytest.raises(AssertionError, match="'too large 0' lacked memory and must run alone after all others"):
        check_executor(Impatient(), isolated=False)


def test_workers_left_running_are_found():
    deserter = Deserter()
    with pytest.raises(AssertionError, match=r"left early: processes \[\d+\] still run after the generator was closed"):
        check_executor(deserter)
    for inner in deserter.left:
        inner.close()
