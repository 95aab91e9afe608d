"""Jobs in worker processes of this machine."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

from depthfold.errors import InvalidValue
from depthfold.jobs.base import Job, Outcome, Setup, expect_positive
from depthfold.jobs.pool import Answered, Event, Lost, Queue, Ready, drive, setup_failed
from depthfold.jobs.worker import STOP, environment
from depthfold.support.optional import load

# Worker processes: started, listened to, and ended. A crew of them.

_GRACE = 10.0  # seconds to end in, for a process that has been told to or that has closed its pipe

# A plain interpreter and not multiprocessing's: that one runs the caller's script again, with all that it imports and
# starts, before it listens. The path is what it needs to find the caller's modules.
_START = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from depthfold.jobs.worker import main
main(int(sys.argv[2]))
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hand:
    """One worker process, our end of its pipe, and what tells of its end (None where the system has no such thing)."""

    process: subprocess.Popen[bytes]
    pipe: connection.Connection[Any, Any]
    sentinel: int | None
    place: str


class Staff:
    """A process for each place; a place is the GPUs that its worker sees."""

    def __init__(self, *, setup: bytes, pack: Callable[[Any], bytes], threads: int, places: tuple[str, ...]) -> None:
        self._setup, self._pack, self._threads, self._places = setup, pack, threads, places
        self.workers: list[Hand] = []

    def size(self) -> int:
        return len(self._places)

    def hire(self) -> Hand:
        free = list(self._places)
        for hand in self.workers:
            free.remove(hand.place)
        ours, theirs = multiprocessing.Pipe()
        variables = {**os.environ, **environment(self._threads, free[0])}
        command = [sys.executable, "-c", _START, json.dumps(sys.path), str(theirs.fileno())]
        # A group of its own: Ctrl-C at the terminal is for the caller, who then ends the workers.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, env=variables, pass_fds=(theirs.fileno(),), process_group=0
        )
        theirs.close()
        sentinel = os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else None
        hand = Hand(process=process, pipe=ours, sentinel=sentinel, place=free[0])
        self.workers.append(hand)
        with contextlib.suppress(OSError):  # dead already: events() will say so
            ours.send((self._setup, self._threads, {}))
        return hand

    def pack(self, payload: Any) -> bytes:
        return self._pack(payload)

    def give(self, worker: Hand, payload: bytes) -> None:
        with contextlib.suppress(OSError):  # dead already: events() will say so
            worker.pipe.send_bytes(payload)

    def events(self) -> Iterator[Event]:
        # The pipe alone does not tell of every end: a process that the work forked may hold it open.
        signs: dict[Any, Hand] = {hand.pipe: hand for hand in self.workers}
        signs |= {hand.sentinel: hand for hand in self.workers if hand.sentinel is not None}
        for hand in {signs[sign]: None for sign in connection.wait(list(signs))}:
            try:
                if not hand.pipe.poll():  # whatever it still said comes first
                    raise EOFError
                message = hand.pipe.recv()
            except (EOFError, OSError):
                yield Lost(worker=hand, how=self._end(hand))
                continue
            if isinstance(message, str):
                raise setup_failed(message)
            yield Ready(worker=hand) if message is None else Answered(worker=hand, answer=message)

    def dismiss(self, workers: Iterable[Hand]) -> None:
        workers = tuple(workers)
        for hand in workers:
            with contextlib.suppress(OSError):
                hand.pipe.send_bytes(STOP)
        for hand in workers:
            self._end(hand)

    def kill(self) -> None:
        for hand in self.workers:
            _kill(hand)
        for hand in tuple(self.workers):
            self._end(hand)

    def _end(self, hand: Hand) -> str:
        """Wait for the end of a process, or bring it about; what it started ends with it. Returns how it ended."""
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = hand.process.wait(_GRACE)
        _kill(hand)
        hand.process.wait()
        hand.pipe.close()
        if hand.sentinel is not None:
            os.close(hand.sentinel)
        self.workers.remove(hand)
        return "its process closed its pipe and went on" if code is None else ending(code)


def ending(code: int) -> str:
    """The exit code of a process in words."""
    if code >= 0:
        return f"its process ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else "a signal"
    hint = ", as the kernel does where memory runs out" if -code == signal.SIGKILL else ""
    return f"its process was ended by {name} (signal {-code}){hint}"


def _kill(hand: Hand) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS forbids it where only zombies are left
        os.killpg(hand.process.pid, signal.SIGKILL)


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
