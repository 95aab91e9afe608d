"""A timer that measures many candidates in rounds, until the time of each is known well enough.

The speed of a machine drifts (clocks, temperature, other processes). Each round runs every candidate a few times, so
that a drift affects all of them equally. All samples are kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from statistics import median
from typing import Protocol, TypeVar

from depthfold.backends import backend_errors
from depthfold.core.speedup import quartiles, relative_spread
from depthfold.errors import BackendError, InvalidValue

Key = TypeVar("Key")
Rounds = list[tuple[float, ...]]  # the samples of each round, in milliseconds


def milliseconds(rounds: Rounds) -> float:
    """Return the latency of a candidate: the median of all its samples."""
    return median(sample for samples in rounds for sample in samples)


class Timed(Protocol):
    """A candidate. `seconds` runs it once and returns the time that it took.

    If it has an attribute `computed` that is True, the time is computed instead of measured.
    """

    def seconds(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Timer:
    """The settings of a measurement.

    A candidate first warms up: until the medians of two consecutive windows of `window` runs differ by at most
    `steady`, or for `warmup` seconds. Then it gets `rounds` rounds of at least `samples` runs and `round_seconds`
    seconds. While the interquartile range of its samples exceeds `spread` times the median, it gets further rounds, at
    most `extra`.
    """

    warmup: float = 0.5
    window: int = 5
    steady: float = 0.05
    rounds: int = 5
    samples: int = 5
    round_seconds: float = 0.03
    spread: float = 0.1
    extra: int = 10

    def __post_init__(self) -> None:
        counts, others = (self.rounds, self.samples, self.window), (self.warmup, self.round_seconds, self.spread)
        if min(counts) < 1 or min(*others, self.extra) < 0:
            raise InvalidValue(
                f"A timer needs at least one round, one sample and one run per window, and no negative values: {self}."
            )

    def warm_up(self, candidate: Timed) -> None:
        deadline = time.perf_counter() + self.warmup
        before = float("inf")
        while time.perf_counter() < deadline:
            now = median(candidate.seconds() for _ in range(self.window))
            if abs(now - before) <= self.steady * now:
                return
            before = now

    def run_once(self, candidate: Timed) -> tuple[float, ...]:
        """Return the samples of one round."""
        samples: list[float] = []
        total, started = 0.0, time.perf_counter()
        computed = getattr(candidate, "computed", False)

        def elapsed() -> float:
            # The clock also counts what the runtime does around a run. A computed time must not depend on it, or the
            # same cost model would give another table on a busy machine.
            return total if computed else max(total, time.perf_counter() - started)

        while len(samples) < self.samples or elapsed() < self.round_seconds:
            seconds = candidate.seconds()
            total += max(seconds, 1e-6)  # a cost model may say 0
            samples.append(1000 * seconds)
        return tuple(samples)

    def is_done(self, rounds: Rounds) -> bool:
        """Return True if the candidate gets no further round: its spread is small enough, or it had all extra ones."""
        if len(rounds) < self.rounds:
            return False
        wide = spread([sample for samples in rounds for sample in samples]) > self.spread
        return not wide or len(rounds) >= self.rounds + self.extra

    def remaining(self, rounds: Rounds) -> int:
        """Return the expected number of further rounds. More may follow if the spread is too large."""
        return 0 if self.is_done(rounds) else max(self.rounds - len(rounds), 1)

    def measure(
        self,
        candidates: Mapping[Key, Timed],
        known: MutableMapping[Key, Rounds],
        add: Callable[[Key, tuple[float, ...]], None] = lambda key, samples: None,
        fail: Callable[[Key, BackendError], None] | None = None,
    ) -> None:
        """Time all candidates in rounds.

        `known` contains the rounds so far and is added to; `add` is called after each round of a candidate. `fail` is
        called for a candidate that fails while it runs, and the others continue; without `fail`, its error is raised.
        """
        for key in candidates:
            known.setdefault(key, [])
        warm: set[Key] = set()
        failed: set[Key] = set()
        while waiting := {
            key: timed for key, timed in candidates.items() if key not in failed and not self.is_done(known[key])
        }:
            fewest = min(len(known[key]) for key in waiting)  # after resuming, some have more rounds than others
            for key, candidate in waiting.items():
                if len(known[key]) > fewest:
                    continue
                try:
                    # A module that ran once may still fail: for example, other modules may use up the memory.
                    with backend_errors("It ran once and then failed"):
                        if key not in warm:
                            self.warm_up(candidate)
                            warm.add(key)
                        samples = self.run_once(candidate)
                except BackendError as error:
                    if fail is None:
                        raise
                    failed.add(key)
                    fail(key, error)
                    continue
                known[key].append(samples)
                add(key, samples)


def spread(samples: list[float]) -> float:
    """Return the interquartile range of the samples as a share of their median."""
    if len(samples) < 2:
        return float("inf")
    return relative_spread(quartiles(samples))
