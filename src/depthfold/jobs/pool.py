"""The scheduling of jobs: attempts, retries, the executor in this process, and the loop over a pool of workers."""

from __future__ import annotations

import contextlib
import pickle
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from depthfold.errors import DepthfoldError, InvalidValue, NotFinite, SpoiledDevice, lacks_memory, spoils_device
from depthfold.jobs.base import Failure, FailureKind, Job, Outcome, Setup, Work
from depthfold.support.coerce import as_whole
from depthfold.support.text import one_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """The pickled result of one attempt, or its failure. If `spoiled`, the worker must not get another job."""

    result: bytes = b""
    failure: Failure | None = None
    seconds: float = 0.0
    spoiled: bool = False


def run_attempt(work: Work, payload: Any) -> Attempt:
    """Call the work. Any Exception is a failure of this job; SystemExit and KeyboardInterrupt are not caught."""
    start = time.perf_counter()
    spoiled = False
    try:
        result, failure = _pickled(work(payload))
    except Exception as error:  # noqa: BLE001 - the work is user code, and the other jobs continue
        result, failure, spoiled = b"", failure_from(error), spoils_device(error)
    return Attempt(result=result, failure=failure, seconds=time.perf_counter() - start, spoiled=spoiled)


def run_setup(setup: Setup) -> Work:
    """Return the work. Raise DepthfoldError if the setup fails."""
    try:
        return setup()
    except Exception as error:
        raise setup_error(describe_error(error)) from error


def setup_error(reason: str) -> DepthfoldError:
    reason = reason.rstrip(".")
    return DepthfoldError(f"The setup of the jobs failed: {reason}. No job was run, because every job needs it.")


def pack_setup(pack: Callable[[Any], bytes], setup: Setup) -> bytes:
    """Return the pickled setup. Raise DepthfoldError if it cannot be pickled, for example because of an open file."""
    try:
        return pack(setup)
    except Exception as error:
        found = f"{type(error).__name__}: {one_line(error)}".rstrip(".")
        advice = "Open files and connections on first use in the dataset's __getitem__"
        if "parametrized" in found:  # by PyTorch, which then pickles only the state dict
            advice = "Remove the parametrizations first (torch.nn.utils.parametrize.remove_parametrizations)"
        raise DepthfoldError(
            f"The setup of the jobs cannot be sent to a worker: {found}. {advice}, or use the executor InProcess "
            "(inline)."
        ) from error


def failure_from(error: Exception) -> Failure:
    kind: FailureKind = "error"
    if isinstance(error, NotFinite):
        kind = "not finite"
    elif lacks_memory(error):
        kind = "out of memory"
    described = kind == "error" or isinstance(error, DepthfoldError)
    return Failure(kind=kind, message=describe_error(error) if described else one_line(error))


def describe_error(error: BaseException) -> str:
    """Return the type, the message, the location and the notes of an error, or the sentences of a DepthfoldError."""
    if isinstance(error, DepthfoldError):
        return str(error)
    text, name = one_line(error), type(error).__name__
    if not text.startswith(name):
        text = f"{name}: {text}"
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return text
    last = frames[-1]
    line = f": {last.line}" if last.line else ""
    located = f"{text} ({Path(last.filename).name}, line {last.lineno}, in {last.name}{line})"
    return ". ".join([located, *getattr(error, "__notes__", ())])


def _pickled(result: Any) -> tuple[bytes, Failure | None]:
    # Also in process: a result that a worker could not send must fail in every executor.
    try:
        return pickle.dumps(result), None
    except (pickle.PicklingError, TypeError, AttributeError) as error:  # pickle raises all three
        found = f"the result is a {type(result).__name__}, which cannot be pickled: {one_line(error)}"
        return b"", Failure(kind="error", message=f"{found}. Return plain values: numbers, text, tuples, dicts.")


ATTEMPTS = 3  # the most attempts of a job whose workers are lost


def decide_retry(failures: Sequence[FailureKind]) -> Literal["queue", "alone"] | None:
    """Decide what happens to a job after these failures: it is queued again, it runs alone at the end, or it failed."""
    *before, last = failures
    if last == "out of memory":
        return None if "out of memory" in before else "alone"
    if last == "worker lost" and len(failures) < ATTEMPTS:
        return "alone" if "out of memory" in before else "queue"
    return None


class Queue:
    """The waiting and the running jobs. Each job leaves the queue once, with its outcome."""

    __slots__ = ("_alone", "_failures", "_running", "_waiting")

    def __init__(self, jobs: Sequence[Job]) -> None:
        repeated = [key for key, number in Counter(job.key for job in jobs).items() if number > 1]
        if repeated:
            raise InvalidValue(f"Several jobs have the key {repeated[0]!r}. Give each job a unique key.")
        self._waiting = deque(jobs)
        self._alone: deque[Job] = deque()
        self._running: dict[str, Job] = {}
        self._failures: dict[str, list[FailureKind]] = {}

    @property
    def done(self) -> bool:
        return not (self._waiting or self._alone or self._running)

    @property
    def waiting(self) -> int:
        """The number of waiting jobs that may run at the same time as others."""
        return len(self._waiting)

    @property
    def alone(self) -> bool:
        """True if only jobs that must run alone are left, and none of them is running."""
        return bool(self._alone) and not self._waiting and not self._running

    def take(self) -> Job | None:
        """Return the next job to run, or None if no further job may run at the same time as the running ones."""
        if self._waiting:
            job = self._waiting.popleft()
        elif self.alone:
            job = self._alone.popleft()
        else:
            return None
        self._running[job.key] = job
        return job

    def finish(self, key: str, attempt: Attempt) -> Outcome | None:
        """Record an attempt. Return the outcome of the job, or None if it will be retried."""
        job = self._running.pop(key)
        failures = self._failures.setdefault(key, [])
        failure, result = attempt.failure, None
        if failure is None:
            try:
                result = pickle.loads(attempt.result)
            except Exception as error:  # noqa: BLE001 - unpickling runs user code, which may be missing here
                failure = failure_from(error)
        if failure is not None:
            failures.append(failure.kind)
            retry = decide_retry(failures)
            if retry is not None:
                (self._waiting if retry == "queue" else self._alone).append(job)
                return None
        attempts = len(failures) + (failure is None)
        return Outcome(key=key, result=result, failure=failure, seconds=attempt.seconds, attempts=attempts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A worker has run its setup."""

    worker: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A worker has finished an attempt."""

    worker: Any
    attempt: Attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A worker has ended, whether or not it had a job."""

    worker: Any
    reason: str
    kind: FailureKind = "worker lost"


Event = Ready | Finished | Lost


class Pool(Protocol):
    """Workers that may be lost. A worker is the object that `start` returns; it gets one job at a time."""

    def size(self) -> int:
        """Return the largest number of workers at this moment."""
        ...

    def start(self) -> Any:
        """Start a worker without waiting for it. It becomes Ready or Lost later."""
        ...

    def pack(self, payload: Any) -> bytes: ...

    def submit(self, worker: Any, payload: bytes) -> None: ...

    def events(self) -> Iterable[Event]:
        """Wait for events, or for a while. Raise DepthfoldError if a setup fails."""
        ...

    def stop(self, workers: Iterable[Any]) -> None:
        """Stop idle workers. They cause no further events."""
        ...


def run_jobs(queue: Queue, pool: Pool) -> Generator[Outcome, None, None]:
    """Run all jobs of the queue in the pool. The caller stops the remaining workers afterwards, even after an error."""
    dispatcher, alone = _Dispatcher(queue, pool), False
    outcomes: list[Outcome] = []
    while True:
        if queue.alone and not alone:
            # A job that runs alone also needs the memory of the idle workers, so they are stopped.
            alone = True
            dispatcher.stop_idle()
        dispatcher.start_workers(1 if alone else pool.size())
        outcomes += dispatcher.submit_jobs()  # before the yield, so that workers are busy while the caller is
        yield from outcomes
        if queue.done:
            return
        outcomes = [outcome for event in pool.events() if (outcome := dispatcher.handle(event)) is not None]


class _Dispatcher:
    """The state of each worker: starting, idle, or busy with a job since a given time."""

    def __init__(self, queue: Queue, pool: Pool) -> None:
        self._queue, self._pool = queue, pool
        self._starting: list[Any] = []
        self._idle: list[Any] = []
        self._busy: list[tuple[Any, str, float]] = []
        self._lost_in_setup = 0  # in a row
        self._most_workers = 1  # at any time so far

    def stop_idle(self) -> None:
        self._pool.stop((*self._starting, *self._idle))
        self._starting, self._idle = [], []

    def start_workers(self, size: int) -> None:
        wanted = min(max(1, size), max(self._queue.waiting, self._queue.alone) + len(self._busy))
        self._most_workers = max(self._most_workers, wanted)
        while len(self._starting) + len(self._idle) + len(self._busy) < wanted:
            self._starting.append(self._pool.start())

    def submit_jobs(self) -> list[Outcome]:
        """Submit jobs to the idle workers. Return the outcomes of jobs whose payload cannot be pickled."""
        outcomes = []
        while self._idle and (job := self._queue.take()) is not None:
            try:
                payload = self._pool.pack(job.payload)
            except Exception as error:  # noqa: BLE001 - pickling runs user code; it is a failure of this job
                outcome = self._queue.finish(job.key, Attempt(failure=failure_from(error)))
                outcomes += [] if outcome is None else [outcome]
                continue
            worker = self._idle.pop()
            self._busy.append((worker, job.key, time.monotonic()))
            self._pool.submit(worker, payload)
        return outcomes

    def handle(self, event: Event) -> Outcome | None:
        worker = event.worker
        if isinstance(event, Ready):
            self._starting = [other for other in self._starting if other is not worker]
            self._idle.append(worker)
            self._lost_in_setup = 0
            return None
        outcome = None
        for entry in [entry for entry in self._busy if entry[0] is worker]:
            self._busy.remove(entry)
            _, key, since = entry
            attempt = event.attempt if isinstance(event, Finished) else _lost_attempt(event, since)
            outcome = self._queue.finish(key, attempt)
        if isinstance(event, Lost):
            self._remove(event)
        elif event.attempt.spoiled:
            self._pool.stop((worker,))
        else:
            self._idle.append(worker)
        return outcome

    def _remove(self, event: Lost) -> None:
        self._idle = [worker for worker in self._idle if worker is not event.worker]
        starting = [worker for worker in self._starting if worker is not event.worker]
        self._lost_in_setup += len(self._starting) - len(starting)
        self._starting = starting
        # A lost node takes all its workers at once and is not a reason to give up, so the limit grows with the pool.
        if self._lost_in_setup >= ATTEMPTS * self._most_workers:
            raise DepthfoldError(
                f"{self._lost_in_setup} workers in a row were lost during setup, before they ran a job; the last one: "
                f"{event.reason}. Run the setup in this process to see why."
            )


def _lost_attempt(event: Lost, since: float) -> Attempt:
    failure = Failure(kind=event.kind, message=event.reason)
    return Attempt(failure=failure, seconds=time.monotonic() - since)


@dataclass(frozen=True, slots=True, kw_only=True)
class InProcess:
    """Runs the jobs in this process with `threads` PyTorch threads. A job starts when the previous outcome was taken.

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
            if attempt.spoiled:  # every further job would fail, and a resumed run would not repeat them
                assert attempt.failure is not None
                raise SpoiledDevice(
                    "The device cannot be used by this process any more: "
                    f"{attempt.failure.message.rstrip('.')}. Run the same again: finished jobs are kept."
                )


@contextlib.contextmanager
def _torch_threads(number: int) -> Iterator[None]:
    import torch  # here, so that importing depthfold.jobs does not import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
