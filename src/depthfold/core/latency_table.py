"""The latency table T[i, j]: how long every span takes as one convolution, on one machine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import ClassVar, Self

from depthfold.core.calibration import Calibration
from depthfold.core.coerce import as_float, as_text, as_tuple, as_tuple_of
from depthfold.core.columns import Row, read_entries, write_rows
from depthfold.core.document import Document
from depthfold.core.environment import Environment
from depthfold.core.network import Network
from depthfold.core.plan import Plan
from depthfold.core.span import Position, Span
from depthfold.core.wording import count
from depthfold.errors import TableError

COLUMNS = ("st", "end", "time", "stdev")
FURTHER = ("bare", "reason")  # not in the published tables
LONGEST = 1e9  # milliseconds, eleven days: nobody measures that, but a placeholder looks like it


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One entry: the time of a span in milliseconds with its samples, or the reason why it has none.

    `time` is what the solver sums; whoever measured chose how it follows from the samples. Published tables have no
    samples, only their mean and standard deviation. `bare` is the time in a plan that has no activation at the end of
    the span; None means the same as `time`. It may be more than `time`: a runtime may have the faster kernel for a
    convolution with its activation, and two measurements differ by noise.
    """

    span: Span
    time: float | None = None
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
        if self.bare is not None:
            bare = _checked(f"The latency of {self.span} without its activation", self.bare)
            object.__setattr__(self, "bare", bare)
            if self.time is None:
                raise TableError(
                    f"The latency entry {self.span} has a time without its activation ({bare:g} ms) and a reason why "
                    "it has no time. Give its time, too, or leave out both."
                )
        what = f"A sample of the latency of {self.span}"
        samples = as_tuple(f"The samples of {self.span}", self.samples, TableError)
        object.__setattr__(self, "samples", tuple(_checked(what, sample) for sample in samples))
        if self.stdev is not None:
            what, expected = f"The standard deviation of {self.span}", "a number from 0 on"
            object.__setattr__(self, "stdev", as_float(what, self.stdev, TableError, expected))
            if not (math.isfinite(self.stdev) and self.stdev >= 0):
                raise TableError(f"{what} must be {expected}, found {self.stdev!r}.")

    @classmethod
    def measured(cls, span: Span, samples: Iterable[float]) -> Self:
        """An entry whose time is the mean of its samples, as in the paper."""
        what = f"A sample of the latency of {span}"
        checked = tuple(_checked(what, sample) for sample in as_tuple(f"The samples of {span}", samples, TableError))
        if not checked:
            raise TableError(f"The latency of {span} needs at least one sample; give the reason if it has none.")
        return cls(span=span, time=fmean(checked), stdev=stdev(checked) if len(checked) > 1 else None, samples=checked)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LatencyTable(Document):
    """T of the paper, with the environment in which it was measured. Spans that are not in it cannot be merged.

    With a `calibration` its times are times in context, so that their sum over a plan predicts a whole network; the
    samples are those of the blocks alone. What everything outside the spans costs is in the spans that start at 0:
    every plan has exactly one of them.
    """

    FORMAT: ClassVar[str] = "depthfold.latency-table"

    network: str = ""
    fingerprint: str = ""
    environment: Environment = field(default_factory=Environment)
    calibration: Calibration | None = None
    entries: tuple[Timing, ...]

    def __post_init__(self) -> None:
        entries = as_tuple_of(Timing, "The entries of a latency table", self.entries, TableError)
        if not entries:
            raise TableError("The latency table is empty: it needs an entry for every span that can be merged.")
        for name in ("network", "fingerprint"):
            as_text(f"The {name} of a latency table", getattr(self, name), TableError)
        ordered = tuple(sorted(entries, key=lambda entry: (entry.span.i, entry.span.j)))
        for one, two in pairwise(ordered):
            if one.span == two.span:
                raise TableError(f"The latency table has two entries for {one.span}; keep one of them.")
        object.__setattr__(self, "entries", ordered)

    @property
    def depth(self) -> Position:
        """L: the last position that an entry reaches."""
        return max(entry.span.j for entry in self.entries)

    @property
    def times(self) -> Mapping[Span, float]:
        """The spans that have a time."""
        return {entry.span: entry.time for entry in self.entries if entry.time is not None}

    @property
    def bare_times(self) -> Mapping[Span, float]:
        """The same spans, with what they take where the plan has no activation at their end."""
        times = ((entry.span, entry.time if entry.bare is None else entry.bare) for entry in self.entries)
        return {span: time for span, time in times if time is not None}

    @property
    def original(self) -> float | None:
        """The latency of the network as it is: the sum over its single layers; None where one of them has no time.

        The `time` of a single layer is that of the layer as the network has it, so it is right here with an activation
        of its own and without one."""
        times = self.times
        singles = [times.get(Span(l - 1, l)) for l in range(1, self.depth + 1)]
        known = [time for time in singles if time is not None]
        return sum_rounded_up(known) if len(known) == len(singles) else None

    def predict(self, network: Network, plan: Plan) -> float:
        """The latency of a plan: the sum over its segments, each with its activation or without, as the plan has it.
        Rounded up to a float, as the solver does."""
        times, bare = self.times, self.bare_times
        segments = network.segments(plan)
        if lacking := [span for span in segments if span not in times]:
            raise TableError(
                f"The latency table has no time for {lacking[0]}, which the plan merges. Measure it, or predict a plan "
                "whose segments are in the table."
            )
        return sum_rounded_up([(times if span.j in plan.activations else bare)[span] for span in segments])

    @classmethod
    def read_csv(
        cls, path: str | Path, *, network: str = "", fingerprint: str = "", environment: Environment | None = None
    ) -> Self:
        """The columns st,end,time,stdev in milliseconds, and bare, the time without an activation at the end; stdev
        and bare may be absent, and further columns are ignored. A CSV file has no environment."""
        entries = read_entries(path, COLUMNS[:3], (*COLUMNS[3:], *FURTHER), _entry)
        if not entries:
            raise TableError(f"{path}: the latency table is empty; expected one line per span below the header.")
        environment = environment or Environment()
        try:
            return cls(network=network, fingerprint=fingerprint, environment=environment, entries=entries)
        except TableError as error:
            raise TableError(f"{path}: {error}") from error

    def write_csv(self, path: str | Path) -> None:
        """The columns of the published tables, and a further one only where an entry has something for it."""
        further = [name for name in FURTHER if any(getattr(entry, name) not in (None, "") for entry in self.entries)]
        rows = ((e.span.i, e.span.j, e.time, e.stdev, *(getattr(e, name) for name in further)) for e in self.entries)
        write_rows(path, (*COLUMNS, *further), rows)

    def __str__(self) -> str:
        timed = len(self.times)
        without = f", {len(self.entries) - timed} without a time" if timed < len(self.entries) else ""
        total = "unknown" if self.original is None else f"{self.original:.4g} ms"
        return (
            f"Latency table of {self.network or 'an unnamed network'}: {count(timed, 'span')}{without}, "
            f"{count(self.depth, 'layer')}, single layers {total} in all; environment: {self.environment}"
        )

    def __repr__(self) -> str:
        size = f"{count(len(self.entries), 'span')}, {count(self.depth, 'layer')}"
        return f"<LatencyTable {self.network or '(unnamed)'}: {size}>"


def sum_rounded_up(times: Sequence[float]) -> float:
    """The smallest float that is not below the exact sum: what takes no longer than it says fits its budget."""
    total = math.fsum(times)
    return total if math.fsum([*times, -total]) <= 0 else math.nextafter(total, math.inf)


def _entry(row: Row) -> Timing:
    span = Span(*row.ends())
    bare = row.number("bare") if row.text("bare") else None
    if row.text("time") is None and (reason := row.text("reason")):
        return Timing(span=span, reason=reason, bare=bare)
    spread = row.number("stdev") if row.text("stdev") else None
    return Timing(span=span, time=row.number("time"), bare=bare, stdev=spread)


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
