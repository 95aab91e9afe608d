"""Jobs handed to a crew of workers: who gets which, and what to do when one is lost."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from depthfold.errors import DepthfoldError
from depthfold.jobs.attempt import Answer, failure_of
from depthfold.jobs.base import Failure, Kind, Outcome
from depthfold.jobs.retry import ATTEMPTS, Queue


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A worker has set up its work."""

    worker: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A worker has done what it was given."""

    worker: Any
    answer: Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A worker is no more, whatever it was doing."""

    worker: Any
    how: str
    kind: Kind = "worker lost"


Event = Ready | Answered | Lost


class Crew(Protocol):
    """Workers that can be lost. A worker is whatever `hire` returns; it gets one job at a time."""

    def size(self) -> int:
        """How many workers there may be now."""
        ...

    def hire(self) -> Any:
        """Begin to start a worker; it is Ready later, or Lost."""
        ...

    def pack(self, payload: Any) -> bytes: ...

    def give(self, worker: Any, payload: bytes) -> None: ...

    def events(self) -> Iterable[Event]:
        """Wait until something happens, or for a while. Raises DepthfoldError where a setup fails."""
        ...

    def dismiss(self, workers: Iterable[Any]) -> None:
        """Let workers go that do nothing. No more is heard of them."""
        ...


def drive(queue: Queue, crew: Crew) -> Generator[Outcome, None, None]:
    """All jobs of the queue, by the crew. The caller ends the workers that are left, however this ends."""
    roster, alone = _Roster(queue, crew), False
    outcomes: list[Outcome] = []
    while True:
        if queue.alone and not alone:
            # To be alone is to have the memory of the others as well: they go, and with them what they hold.
            alone = True
            roster.clear()
        roster.fill(1 if alone else crew.size())
        outcomes += roster.hand_out()  # before the yield: the workers go on while the caller is busy
        yield from outcomes
        if queue.done:
            return
        outcomes = [outcome for event in crew.events() if (outcome := roster.settle(event)) is not None]


class _Roster:
    """Who starts, who waits for a job, and who runs which, since when."""

    def __init__(self, queue: Queue, crew: Crew) -> None:
        self._queue, self._crew = queue, crew
        self._starting: list[Any] = []
        self._idle: list[Any] = []
        self._busy: list[tuple[Any, str, float]] = []
        self._stillborn = 0  # workers lost in their setup since one was ready
        self._largest = 1  # crew so far

    def clear(self) -> None:
        self._crew.dismiss((*self._starting, *self._idle))
        self._starting, self._idle = [], []

    def fill(self, size: int) -> None:
        wanted = min(max(1, size), max(self._queue.waiting, self._queue.alone) + len(self._busy))
        self._largest = max(self._largest, wanted)
        while len(self._starting) + len(self._idle) + len(self._busy) < wanted:
            self._starting.append(self._crew.hire())

    def hand_out(self) -> list[Outcome]:
        """Give jobs to whoever is idle. Returns the outcomes of those that cannot even be sent."""
        outcomes = []
        while self._idle and (job := self._queue.take()) is not None:
            try:
                payload = self._crew.pack(job.payload)
            except Exception as error:  # noqa: BLE001 - the payload's own code; a failure of this job
                outcome = self._queue.answered(job.key, Answer(failure=failure_of(error)))
                outcomes += [] if outcome is None else [outcome]
                continue
            worker = self._idle.pop()
            self._busy.append((worker, job.key, time.monotonic()))
            self._crew.give(worker, payload)
        return outcomes

    def settle(self, event: Event) -> Outcome | None:
        worker = event.worker
        if isinstance(event, Ready):
            self._starting = [other for other in self._starting if other is not worker]
            self._idle.append(worker)
            self._stillborn = 0
            return None
        outcome = None
        for entry in [entry for entry in self._busy if entry[0] is worker]:
            self._busy.remove(entry)
            _, key, since = entry
            answer = event.answer if isinstance(event, Answered) else _loss(event, time.monotonic() - since)
            outcome = self._queue.answered(key, answer)
        if isinstance(event, Lost):
            self._strike_off(event)
        elif event.answer.spoiled:
            self._crew.dismiss((worker,))
        else:
            self._idle.append(worker)
        return outcome

    def _strike_off(self, event: Lost) -> None:
        self._idle = [worker for worker in self._idle if worker is not event.worker]
        starting = [worker for worker in self._starting if worker is not event.worker]
        self._stillborn += len(self._starting) - len(starting)
        self._starting = starting
        # A node that goes away takes all its workers at once, and is no reason to give up: hence so many of each.
        if self._stillborn >= ATTEMPTS * self._largest:
            raise DepthfoldError(
                f"{self._stillborn} workers in a row were lost in the setup of the jobs, before any job was run; the "
                f"last one: {event.how}. Run the setup by itself to see why."
            )


def _loss(event: Lost, seconds: float) -> Answer:
    return Answer(failure=Failure(kind=event.kind, message=event.how), seconds=seconds)
