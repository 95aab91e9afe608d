"""The latency table T[i, j, b]: the time of every span as one convolution, in one environment."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import ClassVar, Self

from depthfold.core.calibration import Calibration
from depthfold.core.environment import Environment
from depthfold.core.network import Network
from depthfold.core.options import left_of
from depthfold.core.plan import Plan, SolvedPlan, plan_of
from depthfold.core.shape import ConvShape
from depthfold.core.span import Position, Span
from depthfold.core.speedup import Quartiles, quartiles
from depthfold.errors import InvalidValue, TableError
from depthfold.support.coerce import as_float
from depthfold.support.csv_table import Row, read_entries, write_entries
from depthfold.support.document import SPARSE, Document, decode, encode
from depthfold.support.table import Table
from depthfold.support.text import count

LONGEST = 1e6  # milliseconds, the limit of an entry: a float64 holds so many whole picoseconds exactly

COLUMNS = ("st", "end", "time", "stdev")
# Not in the published tables, and only where an entry needs them: the time without an activation, and the shape of a
# span with dropped layers.
WITHOUT, SHAPE = "time_without", "shape"
EXTRA = (WITHOUT, SHAPE, "reason")
HEADER = ("span", "ms", "ms without an activation at j", "standard deviation, ms", "reason for no time")


def picoseconds(ms: float) -> int:
    """Return a time of at most LONGEST milliseconds in whole picoseconds, rounded up.

    This is the smallest n for which the float n / 1e9 is not below `ms`. So 0.1 ms is exactly 10^8 ps.
    """
    ps = round(ms * 1e9)
    return ps + (ps / 1e9 < ms)


def sum_times(times: Iterable[float]) -> float:
    """Return the sum in milliseconds of times that are rounded up to whole picoseconds, as the solver adds them."""
    return sum(map(picoseconds, times)) / 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One entry of the latency table: both times of a span, or the reason why it has none.

    `times` are T[i, j, 0] and T[i, j, 1] in milliseconds: without and with an activation at j. They are equal in tables
    that do not distinguish the two. `shape` is the shape of the convolution if some layers of the span are dropped, and
    None if all of them are merged. `quartiles` and `count` describe the samples of the block as it was timed, alone.
    `stdev` is the standard deviation of the samples, on the scale of `times`. `floored` says which of the times are the
    least cost that a calibration counts, and not what it predicts.
    """

    span: Span
    times: tuple[float, float] | None = None
    stdev: float | None = None
    quartiles: Quartiles | None = None
    count: int = 0
    reason: str | None = None
    shape: ConvShape | None = field(default=None, metadata=SPARSE)
    floored: tuple[bool, bool] = field(default=(False, False), metadata=SPARSE)

    def __post_init__(self) -> None:
        if (self.times is None) != bool(self.reason):
            raise TableError(
                f"The latency entry {self.name} must have either times or the reason why it has none; found "
                f"times {self.times!r} and reason {self.reason!r}."
            )
        if self.times is not None:
            without, with_one = self.times
            which = ("", "") if without == with_one else (" without an activation", " with an activation")
            times = (_checked(f"The latency of {self.name}{which[0]}", without),
                     _checked(f"The latency of {self.name}{which[1]}", with_one))  # fmt: skip
            object.__setattr__(self, "times", times)
        if self.stdev is not None:
            what, expected = f"The standard deviation of {self.name}", "a number from 0 on"
            object.__setattr__(self, "stdev", as_float(what, self.stdev, TableError, expected))
            if not 0 <= self.stdev < math.inf:
                raise TableError(f"{what} must be {expected}, found {self.stdev!r}.")

    @property
    def name(self) -> str:
        """The span and its shape if layers are dropped, for messages."""
        return f"{self.span} as {self.shape}" if self.shape else str(self.span)

    def row(self) -> tuple[str, ...]:
        """Return the entry as a row of text, with the columns of HEADER."""
        if self.times is None:
            return (self.name, "", "", "", self.reason or "")
        without, with_one = (
            f"{time:.4g}{' (floor)' if floored else ''}" for time, floored in zip(self.times, self.floored, strict=True)
        )
        return (self.name, with_one, without, "" if self.stdev is None else f"{self.stdev:.2g}", "")

    @classmethod
    def measured(
        cls,
        span: Span,
        samples: Iterable[float],
        times: tuple[float, float] | None = None,
        scale: float = 1.0,
        shape: ConvShape | None = None,
    ) -> Self:
        """Return an entry with a summary of its samples.

        Without `times`, both are the mean of the samples, as in the paper. The standard deviation is multiplied by
        `scale`.
        """
        found = tuple(_checked(f"A sample of the latency of {span}", sample) for sample in samples)
        if not found:
            raise TableError(f"The latency of {span} needs at least one sample. Give the reason if it has none.")
        mean = fmean(found)
        return cls(
            span=span,
            times=(mean, mean) if times is None else times,
            stdev=scale * stdev(found) if len(found) > 1 else None,
            quartiles=quartiles(found),
            count=len(found),
            shape=shape,
        )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LatencyTable(Document):
    """T of the paper, with the environment in which it was measured. A span without an entry cannot be merged.

    A span has one entry for all its layers, and one for each other shape that it has with dropped layers.

    With a `calibration`, the sum of the times over a plan predicts the whole network; the spans that start at 0
    include the cost of everything outside the spans. `activations` are the positions where the original network has an
    activation. If they are None (not known), every layer counts as one with an activation. `doubt` is the reason why
    the times of the entries may not be comparable, None if there is none.
    """

    FORMAT: ClassVar[str] = "depthfold.latency-table"

    network: str = ""
    fingerprint: str = ""
    environment: Environment = field(default_factory=Environment)
    calibration: Calibration | None = None
    activations: frozenset[Position] | None = None
    doubt: str | None = field(default=None, metadata=SPARSE)
    entries: tuple[Timing, ...]

    def __post_init__(self) -> None:
        ordered = tuple(sorted(self.entries, key=_order))
        if not ordered:
            raise TableError("The latency table is empty: it needs an entry for every span that can be merged.")
        for one, two in pairwise(ordered):
            if (one.span, one.shape) == (two.span, two.shape):
                raise TableError(f"The latency table has two entries for {one.name}; keep one of them.")
        object.__setattr__(self, "entries", ordered)

    @property
    def depth(self) -> Position:
        """L: the last position that an entry reaches."""
        return max(entry.span.j for entry in self.entries)

    @property
    def times(self) -> Mapping[Span, tuple[float, float]]:
        """T[i, j, 0] and T[i, j, 1] of the spans that have times, all their layers merged."""
        return {entry.span: entry.times for entry in self.entries if entry.times is not None and entry.shape is None}

    @property
    def shape_times(self) -> Mapping[tuple[Span, ConvShape | None], tuple[float, float]]:
        """The times of all entries that have times, by span and shape; the shape is None if nothing is dropped."""
        return {(entry.span, entry.shape): entry.times for entry in self.entries if entry.times is not None}

    @property
    def drops(self) -> bool:
        """True if an entry is for a span with dropped layers."""
        return any(entry.shape is not None for entry in self.entries)

    @property
    def layers(self) -> tuple[float | None, ...]:
        """The times of the single layers as the original network has them, with or without an activation."""
        known = self.activations
        found: list[float | None] = [None] * self.depth
        for entry in self.entries:
            if len(entry.span) == 1 and entry.times is not None and entry.shape is None:
                l = entry.span.j
                found[l - 1] = entry.times[known is None or l in known]
        return tuple(found)

    @property
    def original(self) -> float | None:
        """The latency of the original network: the sum over its single layers, None if one of them has no time."""
        known = [time for time in self.layers if time is not None]
        return sum_times(known) if len(known) == self.depth else None

    def predict(self, network: Network, plan: Plan | SolvedPlan) -> float:
        """Return the latency of a plan: the sum over its segments, as the solver adds them."""
        if not isinstance(network, Network):
            raise InvalidValue(
                f"predict() takes a network and a plan, found {type(network).__name__}. Give "
                "traced.network, where traced is the result of trace()."
            )
        plan = plan_of(plan)
        if self.fingerprint not in ("", own := network.fingerprint):
            raise TableError(
                f"The latency table is of another network (fingerprint {self.fingerprint}; this one is {own}). Measure "
                "this one, or predict with the network that was measured."
            )
        entries, active = {(entry.span, entry.shape): entry for entry in self.entries}, network.final_activations(plan)
        times = []
        for span in network.segments(plan):
            shape, empty = left_of(network, span, plan.dropped.within(span))
            entry = entries.get((span, shape))
            both = entry.times if entry else self.empty_times(network, span) if empty else None
            if both is None:
                why = f" ({entry.reason})" if entry else ""
                raise TableError(
                    f"The latency table has no time for {span}{f' as {shape}' if shape else ''}{why}, which the plan "
                    "merges. Measure it, or predict a plan whose segments have times."
                )
            times.append(both[span.j in active])
        return sum_times(times)

    def empty_times(self, network: Network, span: Span, outside: float | None = None) -> tuple[float, float] | None:
        """Return the times of a span from which nothing is left, for tables without an entry for it.

        It takes no time, and with an activation what that adds to the last layer of the span. If the span starts at 0,
        the cost of everything outside the spans is also due: `outside`, by default that of the calibration. Return
        None if one of these is unknown, or if a residual that starts before the span ends at j: its addition has no
        time of its own.
        """
        if any(skip.source < span.i for skip in network.skips_into(span.j)):
            return None
        if outside is None and self.calibration is not None:
            outside = self.calibration.outside
        start = outside if span.i == 0 else 0.0
        last = next((e.times for e in self.entries if e.span == Span(span.j - 1, span.j) and e.shape is None), None)
        return None if start is None or last is None else (start, start + max(last[1] - last[0], 0.0))

    @classmethod
    def read_csv(
        cls, path: str | Path, *, network: str = "", fingerprint: str = "", environment: Environment | None = None
    ) -> Self:
        """Read the columns st,end,time in milliseconds, and stdev, time_without, shape and reason if the file has them.

        `time_without` is the time without an activation at the end, equal to `time` where it is empty. `shape` is the
        JSON of a ConvShape, empty where no layer is dropped. Other columns are ignored. A CSV file has no environment.
        """
        entries = read_entries(path, COLUMNS[:3], (*COLUMNS[3:], *EXTRA), _entry)
        environment = environment or Environment()
        try:
            return cls(network=network, fingerprint=fingerprint, environment=environment, entries=entries)
        except TableError as error:
            raise TableError(f"{path}: {error}") from error

    def write_csv(self, path: str | Path) -> None:
        """Write the columns of the published tables, and the others only if an entry needs them."""

        def cells(e: Timing) -> tuple[object, ...]:
            without, time = e.times or (None, None)
            shape = json.dumps(encode(e.shape)) if e.shape else None
            return (e.span.i, e.span.j, time, e.stdev, None if without == time else without, shape, e.reason)

        write_entries(path, COLUMNS, EXTRA, map(cells, self.entries))

    def __str__(self) -> str:
        timed = len(self.times)
        missing, dropping = (sum(entry.times is None for entry in self.entries),
                             sum(entry.shape is not None for entry in self.entries))  # fmt: skip
        without = f", {count(dropping, 'more shape')} with dropped layers" if dropping else ""
        without += f", {missing} without a time" if missing else ""
        total = "unknown" if self.original is None else f"{self.original:.4g} ms"
        return (
            f"Latency table of {self.network or 'an unnamed network'}: {count(timed, 'span')}{without}, "
            f"{count(self.depth, 'layer')}, single layers {total} in all; environment: {self.environment}"
        )

    def _repr_html_(self) -> str:
        return Table((str(self),), HEADER, tuple(entry.row() for entry in self.entries)).html()

    def __repr__(self) -> str:
        number = len(self.entries)
        size = count(number, "entry", "entries") if self.drops else count(number, "span")
        return f"<LatencyTable {self.network or '(unnamed)'}: {size}, {count(self.depth, 'layer')}>"


def _checked(what: str, value: object) -> float:
    time = as_float(what, value, TableError, "milliseconds from 0 on")
    if not 0 <= time <= LONGEST:  # NaN compares with nothing
        raise TableError(
            f"{what} is {time:g} ms; expected milliseconds from 0 to {LONGEST:g}. If the span cannot be timed, give "
            "the reason instead."
        )
    return time


def _entry(row: Row) -> Timing:
    span = Span(*row.ends())
    without, spread = (row.number(name) if row.text(name) else None for name in (WITHOUT, "stdev"))
    shape = _shape(row)
    if row.text("time") is None and (reason := row.text("reason")):
        return Timing(span=span, reason=reason, shape=shape)
    time = row.number("time")
    return Timing(span=span, times=(time if without is None else without, time), stdev=spread, shape=shape)


def _shape(row: Row) -> ConvShape | None:
    text = row.text(SHAPE)
    if text is None:
        return None
    try:
        shape: ConvShape = decode(ConvShape, json.loads(text), f"column {SHAPE!r}")
    except json.JSONDecodeError:
        raise TableError(f"column {SHAPE!r} must hold the JSON of a shape, found {text!r}.") from None
    return shape


def _order(entry: Timing) -> tuple[object, ...]:
    """Sort by span; first the entry without drops, then by the sizes of the shape."""
    s = entry.shape
    key = (s.kernel, s.stride, s.padding, s.dilation, s.groups, s.in_channels, s.out_channels) if s else ()
    return (entry.span, key)
