"""Count the seconds in which the first GPU was busy."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time

INTERVAL = 0.5  # seconds between two samples
# Of the first GPU: with several, nvidia-smi would print a line for each.
QUERY = ("nvidia-smi", "-i", "0", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits")


class DeviceSeconds:
    """A context that samples nvidia-smi, which gives the share of the last moments in which kernels were running.

    `busy` is the sum in seconds, or None if there is no nvidia-smi.
    """

    def __init__(self) -> None:
        self.busy: float | None = None if shutil.which(QUERY[0]) is None else 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> DeviceSeconds:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        before = time.perf_counter()
        while self.busy is not None and not self._over.wait(INTERVAL):
            share = float(subprocess.run(QUERY, capture_output=True, text=True, check=True).stdout) / 100
            now = time.perf_counter()
            self.busy, before = self.busy + share * (now - before), now
