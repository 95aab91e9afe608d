"""How many turns were taken and are still to come, for whoever watches."""

from __future__ import annotations

from collections.abc import Mapping

from depthfold.progress import Progress


class Tally:
    """Counts turns. How many there will be is known only in the end: what spreads too widely gets more of them, and
    what fails gets none. So the total is announced again whenever it changes, before the turn that would end it."""

    __slots__ = ("_done", "_left", "_progress", "_step", "_what")

    def __init__(self, what: str, progress: Progress, done: int, left: Mapping[str, int]) -> None:
        self._what, self._progress, self._done, self._left = what, progress, done, dict(left)
        self._announce()

    def turn(self, key: str, left: int) -> None:
        """One turn of this candidate was taken, and so many are left."""
        foreseen = self._left[key]
        self._left[key] = left + 1
        if left + 1 != foreseen:
            self._announce()
        self._left[key] = left
        self._done += 1
        self._step()

    def failed(self, key: str) -> None:
        """This candidate gets no more turns."""
        if self._left.pop(key, 0):
            self._announce()

    def _announce(self) -> None:
        self._step = self._progress(self._what, self._done + sum(self._left.values()), self._done)
