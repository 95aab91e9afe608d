"""Worker processes: started, listened to, and ended. A crew of them."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

from depthfold.jobs.attempt import setup_failed
from depthfold.jobs.crew import Answered, Event, Lost, Ready
from depthfold.jobs.seat import environment
from depthfold.jobs.worker import STOP

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
