"""What a worker process runs."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import sys
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from depthfold.jobs.pool import Answer, attempt, told

# What lives in a worker, be it a process of this machine or an actor on a cluster: the work, set up once.


class Seat:
    """Set up once, asked for every job. Setup and payloads come pickled: unpickling them is the worker's business, and
    may import torch, which reads the environment only then."""

    def prepare(self, setup: bytes, threads: int, environment: Mapping[str, str]) -> str | None:
        """Build the work. Returns None, or why that failed."""
        os.environ.update(environment)
        try:
            self._work = pickle.loads(setup)()
        except Exception as error:  # noqa: BLE001 - the setup may raise anything; the driver raises it to the caller
            return told(error)
        if "torch" in sys.modules:  # it may have been imported before the environment was set
            sys.modules["torch"].set_num_threads(threads)
        return None

    def attempt(self, payload: bytes) -> Answer:
        return attempt(self._unpacked, payload)

    def _unpacked(self, payload: bytes) -> Any:
        return self._work(pickle.loads(payload))


def environment(threads: int, gpus: str | None) -> dict[str, str]:
    """The environment of a worker: how many threads its libraries start, and the GPUs that it sees (None: as it is)."""
    libraries = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    found = {name: str(threads) for name in libraries}
    return found if gpus is None else found | {"CUDA_VISIBLE_DEVICES": gpus}


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
