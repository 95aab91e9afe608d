"""An executor that runs jobs in worker processes of this machine."""

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
from depthfold.jobs.base import Job, Outcome, Setup
from depthfold.jobs.pool import Event, Finished, Lost, Queue, Ready, pack_setup, run_jobs, setup_error
from depthfold.jobs.worker import STOP, environment_variables
from depthfold.support.coerce import as_whole
from depthfold.support.machine import usable_cores
from depthfold.support.optional import load

_STOP_SECONDS = 10.0  # for a process to exit after STOP or after it closed its pipe

# A plain interpreter instead of multiprocessing's, which runs the caller's script again before it listens. The path
# lets it find the caller's modules.
_START = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from depthfold.jobs.worker import main
main(int(sys.argv[2]))
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkerProcess:
    """A worker process, our end of its pipe, and a descriptor that is ready when it exits (None on other systems)."""

    process: subprocess.Popen[bytes]
    pipe: connection.Connection[Any, Any]
    sentinel: int | None
    visible_gpus: str


class ProcessPool:
    """A pool of worker processes, one for each item of `visible_gpus`, its value of CUDA_VISIBLE_DEVICES."""

    def __init__(
        self, *, setup: bytes, pack: Callable[[Any], bytes], threads: int, visible_gpus: tuple[str, ...]
    ) -> None:
        self._setup, self._pack, self._threads, self._visible_gpus = setup, pack, threads, visible_gpus
        self.workers: list[WorkerProcess] = []

    def size(self) -> int:
        return len(self._visible_gpus)

    def start(self) -> WorkerProcess:
        free = list(self._visible_gpus)
        for worker in self.workers:
            free.remove(worker.visible_gpus)
        ours, theirs = multiprocessing.Pipe()
        variables = {**os.environ, **environment_variables(self._threads, free[0])}
        command = [sys.executable, "-c", _START, json.dumps(sys.path), str(theirs.fileno())]
        # In its own process group: Ctrl-C in the terminal reaches only the caller, which then stops the workers.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, env=variables, pass_fds=(theirs.fileno(),), process_group=0
        )
        theirs.close()
        sentinel = os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else None
        worker = WorkerProcess(process=process, pipe=ours, sentinel=sentinel, visible_gpus=free[0])
        self.workers.append(worker)
        with contextlib.suppress(OSError):  # it has ended; events() reports it
            ours.send((self._setup, self._threads, {}))
        return worker

    def pack(self, payload: Any) -> bytes:
        return self._pack(payload)

    def submit(self, worker: WorkerProcess, payload: bytes) -> None:
        with contextlib.suppress(OSError):  # it has ended; events() reports it
            worker.pipe.send_bytes(payload)

    def events(self) -> Iterator[Event]:
        # The pipe does not show every exit: a process that the work forked may hold it open.
        sources: dict[Any, WorkerProcess] = {worker.pipe: worker for worker in self.workers}
        sources |= {worker.sentinel: worker for worker in self.workers if worker.sentinel is not None}
        for worker in {sources[ready]: None for ready in connection.wait(list(sources))}:
            try:
                if not worker.pipe.poll():  # a message that it sent before its exit comes first
                    raise EOFError
                message = worker.pipe.recv()
            except (EOFError, OSError):
                yield Lost(worker=worker, reason=self._end(worker))
                continue
            if isinstance(message, str):
                raise setup_error(message)
            yield Ready(worker=worker) if message is None else Finished(worker=worker, attempt=message)

    def stop(self, workers: Iterable[WorkerProcess]) -> None:
        workers = tuple(workers)
        for worker in workers:
            with contextlib.suppress(OSError):
                worker.pipe.send_bytes(STOP)
        for worker in workers:
            self._end(worker)

    def kill(self) -> None:
        for worker in self.workers:
            _kill(worker)
        for worker in tuple(self.workers):
            self._end(worker)

    def _end(self, worker: WorkerProcess) -> str:
        """Wait for a process to exit, then kill it and everything that it started. Return how it ended."""
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = worker.process.wait(_STOP_SECONDS)
        _kill(worker)
        worker.process.wait()
        worker.pipe.close()
        if worker.sentinel is not None:
            os.close(worker.sentinel)
        self.workers.remove(worker)
        return "its process closed its pipe but did not exit" if code is None else describe_exit(code)


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"its process ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else "a signal"
    hint = ", which the kernel sends when memory runs out" if -code == signal.SIGKILL else ""
    return f"its process was ended by {name} (signal {-code}){hint}"


def _kill(worker: WorkerProcess) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: PermissionError if only zombies are left
        os.killpg(worker.process.pid, signal.SIGKILL)


_GPU = re.compile(r"cuda:(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """Runs the jobs in new interpreters, each with `threads` threads. Each worker runs the setup once.

    On the CPU there are `workers` workers (None: as many as the usable cores allow). With `devices` such as
    ("cuda:0", "cuda:1") there are `workers_per_device` workers per GPU. A worker sees only its own GPU, as "cuda". A
    setup that uses "cuda" if `torch.cuda.is_available()`, and otherwise the CPU, therefore works everywhere.

    A worker that dies is replaced. All workers end with the run, whether it completes, is closed early, or is killed.
    Setup and payloads are sent with cloudpickle, so functions and classes of a script or Jupyter notebook work; results
    are sent with pickle.
    """

    workers: int | None = None
    threads: int = 1
    devices: tuple[str, ...] = ("cpu",)
    workers_per_device: int = 1

    def __post_init__(self) -> None:
        if self.workers is not None:
            as_whole("The number of workers", self.workers, InvalidValue)
        as_whole("The number of threads", self.threads, InvalidValue)
        as_whole("The number of workers per device", self.workers_per_device, InvalidValue)
        if isinstance(self.devices, list):
            object.__setattr__(self, "devices", tuple(self.devices))
        if self.devices == ("cpu",):
            return
        gpus = all(isinstance(device, str) and _GPU.fullmatch(device) for device in self.devices)
        if not self.devices or not gpus or len(set(self.devices)) < len(self.devices):
            raise InvalidValue(
                f'The devices must be ("cpu",), or different GPUs such as ("cuda:0", "cuda:1"); found {self.devices!r}.'
            )
        if self.workers is not None:
            raise InvalidValue(
                f"workers={self.workers} cannot be combined with GPUs. Use workers_per_device instead of workers."
            )

    def run(self, setup: Setup, jobs: Sequence[Job]) -> Generator[Outcome, None, None]:
        return self._outcomes(setup, Queue(jobs), self._visible_gpus())

    def _outcomes(self, setup: Setup, queue: Queue, visible_gpus: tuple[str, ...]) -> Generator[Outcome, None, None]:
        if queue.done:
            return
        pack = load("cloudpickle", "processes").dumps
        pool = ProcessPool(setup=pack_setup(pack, setup), pack=pack, threads=self.threads, visible_gpus=visible_gpus)
        try:
            yield from run_jobs(queue, pool)
            pool.stop(pool.workers)
        finally:
            pool.kill()

    def _visible_gpus(self) -> tuple[str, ...]:
        """Return CUDA_VISIBLE_DEVICES for each worker."""
        if self.devices == ("cpu",):
            return ("",) * (self.workers or max(1, usable_cores() // self.threads))
        return tuple(map(_visible_gpu, self.devices)) * self.workers_per_device


def _visible_gpu(device: str) -> str:
    """Return the name of a GPU in CUDA_VISIBLE_DEVICES, which may already limit the GPUs of this process."""
    number = device.partition(":")[2]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return number
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if int(number) >= len(names):
        raise InvalidValue(
            f"There is no {device}: this process sees {len(names)} GPUs (CUDA_VISIBLE_DEVICES={visible!r}). Use "
            "one of those, or change the variable."
        )
    return names[int(number)]
