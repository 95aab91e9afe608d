"""Which jobs are run, when, and how often. The same rules for all executors; no clock, no process, no network."""

from __future__ import annotations

import pickle
from collections import Counter, deque
from collections.abc import Sequence
from typing import Literal

from depthfold.errors import InvalidValue
from depthfold.jobs.attempt import Answer, failure_of
from depthfold.jobs.base import Job, Kind, Outcome

ATTEMPTS = 3  # of a job whose workers are lost, in all


def again(kinds: Sequence[Kind]) -> Literal["queue", "alone"] | None:
    """What to do with a job that failed in these ways, the last one just now: give it up, put it at the end of the
    queue, or run it alone when all others are done."""
    *before, last = kinds
    if last == "out of memory":
        return None if "out of memory" in before else "alone"
    if last == "worker lost" and len(kinds) < ATTEMPTS:
        return "alone" if "out of memory" in before else "queue"
    return None


class Queue:
    """The jobs that wait and those that run. Each leaves it once, with its outcome."""

    __slots__ = ("_alone", "_failed", "_running", "_waiting")

    def __init__(self, jobs: Sequence[Job]) -> None:
        repeated = [key for key, number in Counter(job.key for job in jobs).items() if number > 1]
        if repeated:
            raise InvalidValue(
                f"Several jobs have the key {repeated[0]!r}; expected a key for each. Give each job a key of its own."
            )
        self._waiting = deque(jobs)
        self._alone: deque[Job] = deque()
        self._running: dict[str, Job] = {}
        self._failed: dict[str, list[Kind]] = {}

    @property
    def done(self) -> bool:
        return not (self._waiting or self._alone or self._running)

    @property
    def waiting(self) -> int:
        """How many jobs wait that may run beside others."""
        return len(self._waiting)

    @property
    def alone(self) -> bool:
        """Whether nothing is left but jobs that run alone, and none of them runs yet."""
        return bool(self._alone) and not self._waiting and not self._running

    def take(self) -> Job | None:
        """The next job to run now, or None if none may run beside those that do."""
        if self._waiting:
            job = self._waiting.popleft()
        elif self.alone:
            job = self._alone.popleft()
        else:
            return None
        self._running[job.key] = job
        return job

    def answered(self, key: str, answer: Answer) -> Outcome | None:
        """The outcome of a job that ran; None if it is to run again."""
        job = self._running.pop(key)
        failed = self._failed.setdefault(key, [])
        failure, result = answer.failure, None
        if failure is None:
            try:
                result = pickle.loads(answer.result)
            except Exception as error:  # noqa: BLE001 - the result's own code, which this process may lack
                failure = failure_of(error)
        if failure is not None:
            failed.append(failure.kind)
            place = again(failed)
            if place is not None:
                (self._waiting if place == "queue" else self._alone).append(job)
                return None
        attempts = len(failed) + (failure is None)
        return Outcome(key=key, result=result, failure=failure, seconds=answer.seconds, attempts=attempts)
