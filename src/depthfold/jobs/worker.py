"""The code that runs in a worker: a process of this machine, or an actor on a Ray cluster."""

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

from depthfold.jobs.pool import Attempt, describe_error, run_attempt


class Worker:
    """Holds the work, which is set up once and called for each job.

    Setup and payloads arrive pickled. They are unpickled here, after the environment variables are set, because
    unpickling may import torch.
    """

    def prepare(self, setup: bytes, threads: int, environment: Mapping[str, str]) -> str | None:
        """Run the setup. Return None, or a description of the error."""
        os.environ.update(environment)
        try:
            self._work = pickle.loads(setup)()
        except Exception as error:  # noqa: BLE001 - the setup is user code; the caller raises its error
            return describe_error(error)
        if "torch" in sys.modules:  # it may have been imported before the variables were set
            sys.modules["torch"].set_num_threads(threads)
        return None

    def attempt(self, payload: bytes) -> Attempt:
        return run_attempt(lambda pickled: self._work(pickle.loads(pickled)), payload)


def environment_variables(threads: int, visible_gpus: str | None) -> dict[str, str]:
    """Return the environment variables of a worker. With `visible_gpus=None`, its GPUs are not restricted."""
    variables = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    found = {name: str(threads) for name in variables}
    return found if visible_gpus is None else found | {"CUDA_VISIBLE_DEVICES": visible_gpus}


STOP = b""  # sent instead of a payload


def main(handle: int) -> None:
    """Run the setup, then the jobs that arrive through the pipe, until STOP arrives or the other end is closed."""
    sys.argv = [""]
    os.set_inheritable(handle, False)  # a program that the work starts must not keep the pipe open
    threading.Thread(target=_exit_with_parent, args=(handle, os.getppid()), daemon=True).start()
    pipe, worker = Connection(handle), Worker()
    with contextlib.suppress(EOFError, ConnectionError):
        pipe.send(worker.prepare(*pipe.recv()))
        while (payload := pipe.recv_bytes()) != STOP:
            pipe.send(worker.attempt(payload))


def _exit_with_parent(handle: int, parent: int) -> None:
    """Kill this process and the processes that the work started as soon as the parent ends, even during a job.

    The pipe hangs up when the parent ends. A process that the parent forked may still hold the other end open, so the
    parent is also checked every second.
    """
    poll = select.poll()
    poll.register(handle, 0)
    while not poll.poll(1000) and os.getppid() == parent:
        pass
    os.killpg(0, signal.SIGKILL)  # a worker leads its own process group
