"""What a worker process runs."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
from multiprocessing.connection import Connection

from depthfold.jobs.seat import Seat

STOP = b""  # instead of a payload


def main(handle: int) -> None:
    """Set up, then do what comes through the pipe until it says stop or the other end is gone."""
    sys.argv = [""]
    os.set_inheritable(handle, False)  # a program that the work starts must not keep the pipe open
    threading.Thread(target=_watch, args=(handle, os.getppid()), daemon=True).start()
    pipe, seat = Connection(handle), Seat()
    with contextlib.suppress(EOFError, ConnectionError):
        pipe.send(seat.prepare(*pipe.recv()))
        while (payload := pipe.recv_bytes()) != STOP:
            pipe.send(seat.attempt(payload))


def _watch(handle: int, parent: int) -> None:
    """End this process, and those that the work started, as soon as the parent is gone: also while it computes.

    The pipe hangs up when the parent ends, however it ends. A process that the parent forked may still hold the other
    end, though, so the parent itself is looked at every second.
    """
    poll = select.poll()
    poll.register(handle, 0)
    while not poll.poll(1000) and os.getppid() == parent:
        pass
    os.killpg(0, signal.SIGKILL)  # a worker leads a process group of its own
