"""One entry of the latency table: the time of a span, or the reason why it has none."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Self

from depthfold.core.span import Span
from depthfold.errors import TableError
from depthfold.support.coerce import as_float, as_text, as_tuple

LONGEST = 1e9  # milliseconds, eleven days: nobody measures that, but a placeholder looks like it


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One entry: the time of a span in milliseconds with its samples, or the reason why it has none.

    `time` is that of the block as it was timed: whoever measured chose how it follows from the samples, and whether an
    activation stands at its end (`measure_latency`: for a single layer, if the network has one there; for several in
    one, if it has any). `active` is the time with an activation there and `bare` the time without one, each None if it
    is the same as `time`. Published tables have `time` alone, and no samples, only their mean and standard deviation.
    """

    span: Span
    time: float | None = None
    active: float | None = None
    bare: float | None = None
    stdev: float | None = None
    samples: tuple[float, ...] = ()
    reason: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.span, Span):
            raise TableError(f"A latency entry is of a Span(i, j), found {self.span!r}.")
        if self.reason is not None:
            as_text(f"The reason of the latency entry {self.span}", self.reason, TableError)
        if (self.time is None) != bool(self.reason):
            raise TableError(
                f"The latency entry {self.span} must have a time, or else the reason why it has none; "
                f"found time {self.time!r} and reason {self.reason!r}."
            )
        if self.time is not None:
            object.__setattr__(self, "time", _checked(f"The latency of {self.span}", self.time))
        for name, words in (("active", "with"), ("bare", "without")):
            if (other := getattr(self, name)) is not None:
                other = _checked(f"The latency of {self.span} {words} an activation", other)
                object.__setattr__(self, name, other)
                if self.time is None:
                    raise TableError(
                        f"The latency entry {self.span} has a time {words} an activation ({other:g} ms) and a reason "
                        "why it has no time. Give its time, too, or leave out both."
                    )
        what = f"A sample of the latency of {self.span}"
        samples = as_tuple(f"The samples of {self.span}", self.samples, TableError)
        object.__setattr__(self, "samples", tuple(_checked(what, sample) for sample in samples))
        if self.stdev is not None:
            what, expected = f"The standard deviation of {self.span}", "a number from 0 on"
            object.__setattr__(self, "stdev", as_float(what, self.stdev, TableError, expected))
            if not (math.isfinite(self.stdev) and self.stdev >= 0):
                raise TableError(f"{what} must be {expected}, found {self.stdev!r}.")

    def takes(self, active: bool) -> float | None:
        """Its time in a plan that has an activation at the end of the span, or has none."""
        other = self.active if active else self.bare
        return self.time if other is None else other

    @classmethod
    def measured(cls, span: Span, samples: Iterable[float]) -> Self:
        """An entry whose time is the mean of its samples, as in the paper."""
        what = f"A sample of the latency of {span}"
        checked = tuple(_checked(what, sample) for sample in as_tuple(f"The samples of {span}", samples, TableError))
        if not checked:
            raise TableError(f"The latency of {span} needs at least one sample; give the reason if it has none.")
        return cls(span=span, time=fmean(checked), stdev=stdev(checked) if len(checked) > 1 else None, samples=checked)


def _checked(what: str, value: object) -> float:
    time = as_float(what, value, TableError, "milliseconds from 0 on")
    if math.isnan(time):
        raise TableError(f"{what} is NaN; expected milliseconds. Measure it again, or give the reason instead.")
    if math.isinf(time):
        raise TableError(f"{what} is infinite; a span that cannot be timed has a reason instead of a time.")
    if time < 0:
        raise TableError(f"{what} is negative ({time:g} ms); expected milliseconds from 0 on. Measure it again.")
    if time > LONGEST:
        raise TableError(
            f"{what} is {time:g} ms; expected at most {LONGEST:g} ms (eleven days). A span that is out of the question "
            "has a reason instead of a time."
        )
    return time
