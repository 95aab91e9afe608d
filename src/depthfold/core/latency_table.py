"""The latency table T[i, j]: how long every span takes as one convolution, on one machine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, Self

from depthfold.core.calibration import Calibration
from depthfold.core.environment import Environment
from depthfold.core.network import Network
from depthfold.core.plan import Plan
from depthfold.core.span import Position, Span
from depthfold.core.timing import Timing
from depthfold.errors import InvalidValue, TableError
from depthfold.support.coerce import as_text, as_tuple_of
from depthfold.support.csv_table import Row, read_entries, write_rows
from depthfold.support.document import Document
from depthfold.support.text import count

COLUMNS = ("st", "end", "time", "stdev")
FURTHER = ("active", "bare", "reason")  # not in the published tables


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
        """The spans that have a time, with the time of their blocks as they were timed."""
        return {entry.span: entry.time for entry in self.entries if entry.time is not None}

    def times_if(self, active: bool) -> Mapping[Span, float]:
        """The same spans, with what they take in a plan that has an activation at their end, or that has none."""
        times = ((entry.span, entry.takes(active)) for entry in self.entries)
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
        """The latency of a plan: the sum over its segments, each with an activation or without, as the plan has it.
        Rounded up to a float, as the solver does."""
        if not isinstance(network, Network) or not isinstance(plan, Plan):
            raise InvalidValue(
                f"predict() takes a network and a plan, found {type(network).__name__} and {type(plan).__name__}. The "
                "first is traced.network, where traced is what trace(model, inputs) returns."
            )
        if self.fingerprint not in ("", own := network.fingerprint):
            raise TableError(
                f"The latency table is of another network (fingerprint {self.fingerprint}; this one is {own}). Measure "
                "this one, or predict with the network that was measured."
            )
        entries, standing = {entry.span: entry for entry in self.entries}, network.standing(plan)
        times = []
        for span in network.segments(plan):
            entry = entries.get(span)
            time = entry.takes(span.j in standing) if entry else None
            if time is None:
                why = f" ({entry.reason})" if entry else ""
                raise TableError(
                    f"The latency table has no time for {span}{why}, which the plan merges. Measure it, or predict a "
                    "plan whose segments have times."
                )
            times.append(time)
        return sum_rounded_up(times)

    @classmethod
    def read_csv(
        cls, path: str | Path, *, network: str = "", fingerprint: str = "", environment: Environment | None = None
    ) -> Self:
        """The columns st,end,time,stdev in milliseconds, and active and bare, the times with an activation at the end
        and without one where they differ from time; these and stdev may be absent, and further columns are ignored. A
        CSV file has no environment."""
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
    active, bare, spread = (row.number(name) if row.text(name) else None for name in ("active", "bare", "stdev"))
    if row.text("time") is None and (reason := row.text("reason")):
        return Timing(span=span, reason=reason, active=active, bare=bare)
    return Timing(span=span, time=row.number("time"), active=active, bare=bare, stdev=spread)
