"""What lives in a worker, be it a process of this machine or an actor on a cluster: the work, set up once."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Mapping
from typing import Any

from depthfold.jobs.attempt import Answer, attempt, told


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
