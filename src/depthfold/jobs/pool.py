"""Jobs handed to a crew of workers: who gets which, and what to do when one is lost."""

from __future__ import annotations

import pickle
import time
import traceback
from collections import Counter, deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from depthfold.errors import DepthfoldError, InvalidValue, NotFinite, lacks_memory, spoils_device
from depthfold.jobs.base import Failure, Job, Kind, Outcome, Setup, Work
from depthfold.support.text import one_line

# One attempt at a job: the same code in every executor, so that a job fails in the same words wherever it runs.


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of an attempt: the result, pickled, or the failure. A `spoiled` worker must not get another job."""

    result: bytes = b""
    failure: Failure | None = None
    seconds: float = 0.0
    spoiled: bool = False


def attempt(work: Work, payload: Any) -> Answer:
    """Call the work. Whatever it raises is a failure of this job; SystemExit and KeyboardInterrupt are not its own."""
    start = time.perf_counter()
    spoiled = False
    try:
        result, failure = _pickled(work(payload))
    except Exception as error:  # noqa: BLE001 - the work may raise anything, and the other jobs go on
        result, failure, spoiled = b"", failure_of(error), spoils_device(error)
    return Answer(result=result, failure=failure, seconds=time.perf_counter() - start, spoiled=spoiled)


def begin(setup: Setup) -> Work:
    """Build the work, or raise what is fatal to all jobs."""
    try:
        return setup()
    except Exception as error:
        raise setup_failed(told(error)) from error


def setup_failed(why: str) -> DepthfoldError:
    return DepthfoldError(f"The setup of the jobs failed: {why}. It would fail for every job, so none was run.")


def failure_of(error: Exception) -> Failure:
    kind: Kind = "error"
    if isinstance(error, NotFinite):
        kind = "not finite"
    elif lacks_memory(error):
        kind = "out of memory"
    return Failure(kind=kind, message=told(error) if kind == "error" else one_line(error))


def told(error: BaseException) -> str:
    """An error in one line: its type, its message and where it was raised."""
    text, name = one_line(error), type(error).__name__
    if not text.startswith(name):
        text = f"{name}: {text}"
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return text
    last = frames[-1]
    line = f": {last.line}" if last.line else ""
    return f"{text} ({Path(last.filename).name}, line {last.lineno}, in {last.name}{line})"


def _pickled(result: Any) -> tuple[bytes, Failure | None]:
    # In process, too: a result that could not come from a worker must not work here and fail on the cluster.
    try:
        return pickle.dumps(result), None
    except (pickle.PicklingError, TypeError, AttributeError) as error:  # what pickle raises for what it cannot do
        found = f"the result is a {type(result).__name__}, which cannot be pickled: {one_line(error)}"
        return b"", Failure(kind="error", message=f"{found}. Return plain values: numbers, text, tuples, dicts.")


# Which jobs are run, when, and how often. The same rules for all executors; no clock, no process, no network.

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
