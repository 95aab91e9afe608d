"""The timer: many candidates measured in turns, until each is known well enough.

One candidate after another would be unfair on a machine that drifts (clocks, temperature, neighbours): the turns are
short and go round, so that a bad moment hurts all alike. Every sample is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Protocol, TypeVar

from depthfold.backends import backend_errors
from depthfold.errors import BackendError, InvalidValue

Key = TypeVar("Key")
Turns = list[tuple[float, ...]]  # the samples of each turn, in milliseconds


def milliseconds(turns: Turns) -> float:
    """What is stated of a candidate: the median of all its samples."""
    return median(sample for turn in turns for sample in turn)


class Timed(Protocol):
    """What can be timed: one run takes so many seconds."""

    def seconds(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Timer:
    """How long and how often to measure.

    A candidate is first run until it is steady: two windows of `window` runs in a row whose medians differ by less
    than `steady`, or `warmup` seconds. Then it gets `turns` turns of at least `samples` runs and `turn` seconds. While
    the middle half of its samples is spread over more than `spread` of the median, it gets up to `extra` turns more.
    """

    warmup: float = 0.5
    window: int = 5
    steady: float = 0.05
    turns: int = 5
    samples: int = 5
    turn: float = 0.03
    spread: float = 0.1
    extra: int = 10

    def __post_init__(self) -> None:
        if min(self.turns, self.samples, self.window) < 1 or min(self.warmup, self.turn, self.spread, self.extra) < 0:
            raise InvalidValue(f"A timer needs one turn, sample and window at least, and no negative time: {self}.")

    def warm_up(self, candidate: Timed) -> None:
        deadline = time.perf_counter() + self.warmup
        before = float("inf")
        while time.perf_counter() < deadline:
            now = median(candidate.seconds() for _ in range(self.window))
            if abs(now - before) <= self.steady * now:
                return
            before = now

    def take_turn(self, candidate: Timed) -> tuple[float, ...]:
        samples: list[float] = []
        taken, started = 0.0, time.perf_counter()
        # By its own account, too: a cost model says how long a run would take at once, and would be asked a million
        # times in the time of a turn.
        while len(samples) < self.samples or max(taken, time.perf_counter() - started) < self.turn:
            seconds = candidate.seconds()
            taken += seconds
            samples.append(1000 * seconds)
        return tuple(samples)

    def enough(self, turns: Turns) -> bool:
        """Whether these turns are all that a candidate gets: it is known well enough, or will not become so."""
        if len(turns) < self.turns:
            return False
        wide = spread([sample for turn in turns for sample in turn]) > self.spread
        return not wide or len(turns) >= self.turns + self.extra

    def left(self, turns: Turns) -> int:
        """How many turns a candidate still gets, as far as can be told: more follow while its spread is too wide."""
        return 0 if self.enough(turns) else max(self.turns - len(turns), 1)

    def measure(
        self,
        candidates: Mapping[Key, Timed],
        known: MutableMapping[Key, Turns],
        keep: Callable[[Key, tuple[float, ...]], None] = lambda key, samples: None,
        fail: Callable[[Key, BackendError], None] | None = None,
    ) -> None:
        """Give every candidate its turns, round by round. `known` holds the turns taken so far, and is added to;
        `keep` is called with each turn as soon as it was taken. A candidate that fails while it runs is told to `fail`
        and gets no more turns; without one, its error ends the measurement."""
        for key in candidates:
            known.setdefault(key, [])
        warm: set[Key] = set()
        failed: set[Key] = set()
        while waiting := {
            key: timed for key, timed in candidates.items() if key not in failed and not self.enough(known[key])
        }:
            fewest = min(len(known[key]) for key in waiting)  # after a resumption some are ahead of the others
            for key, candidate in waiting.items():
                if len(known[key]) > fewest:
                    continue
                try:
                    # What has run once may still fail: memory runs out beside others, or a device gives up.
                    with backend_errors("It ran once and then failed"):
                        if key not in warm:
                            self.warm_up(candidate)
                            warm.add(key)
                        samples = self.take_turn(candidate)
                except BackendError as error:
                    if fail is None:
                        raise
                    failed.add(key)
                    fail(key, error)
                    continue
                known[key].append(samples)
                keep(key, samples)


def spread(samples: list[float]) -> float:
    """The width of the middle half of the samples, as a share of the median."""
    if len(samples) < 2:
        return float("inf")
    low, middle, high = quantiles(samples, n=4, method="inclusive")
    return (high - low) / middle if middle else 0.0
