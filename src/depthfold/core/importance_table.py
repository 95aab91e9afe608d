"""The importance table I[i, j, a, b]: the change of the score when the activations inside a span are removed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import ClassVar, Self

from depthfold.core.drops import NOTHING, Drops
from depthfold.core.environment import Environment
from depthfold.core.options import BlockOption
from depthfold.core.span import FlaggedSpan, Position
from depthfold.errors import PlanError, TableError
from depthfold.support.coerce import as_float
from depthfold.support.csv_table import Row, read_entries, write_entries
from depthfold.support.document import SPARSE, Document
from depthfold.support.table import Table
from depthfold.support.text import count

COLUMNS = ("st", "end", "st_act", "end_act", "imp")
HEADER = ("block", "importance (change of the score)", "score", "samples", "reason for no score")
EXTRA = ("dropped", "reason")  # only where an entry needs them
ACCURACY = "accuracy, in points"  # what the tables of ClassificationTask state as their quantity
LARGEST = 1e100  # far beyond any score; sums and differences of such numbers are still floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One entry: the scores of the network whose span has lost its inner activations, or the reason why it has none.

    `samples` has one score (an accuracy, for example) for each short training, and `seeds` the seeds of these
    trainings, if they are known. `dropped` are the convolutions and branches of the span that are left out.
    """

    span: FlaggedSpan
    samples: tuple[float, ...] = ()
    reason: str | None = None
    seeds: tuple[int, ...] = ()
    dropped: Drops = field(default=NOTHING, metadata=SPARSE)

    def __post_init__(self) -> None:
        samples = tuple(_checked(f"A score of {self.name}", score) for score in self.samples)
        object.__setattr__(self, "samples", samples)
        object.__setattr__(self, "seeds", tuple(map(int, self.seeds)))
        if bool(self.samples) == bool(self.reason):
            raise TableError(
                f"The importance entry {self.name} must have either scores or the reason why it has none; found "
                f"scores {self.samples!r} and reason {self.reason!r}."
            )
        if len(self.seeds) not in (0, len(self.samples)):
            raise TableError(
                f"The importance entry {self.name} has {len(self.samples)} scores and {len(self.seeds)} seeds; "
                "expected one for each score, or none at all."
            )
        if self.dropped != self.dropped.within(self.span.span):
            raise TableError(
                f"The importance entry {self.name} drops something outside its span. Drop only layers and branches "
                "inside it."
            )

    @property
    def name(self) -> str:
        """The block and what it drops, for messages."""
        return str(BlockOption(self.span, self.dropped))

    @property
    def mean(self) -> float:
        return self.samples[0] if len(self.samples) == 1 else fmean(self.samples)

    def row(self, base: float) -> tuple[str, ...]:
        """Return the entry as a row of text, with the columns of HEADER. `base` is the score of the original."""
        if not self.samples:
            return (self.name, "", "", "0", self.reason or "")
        return (self.name, f"{self.mean - base:.4g}", f"{self.mean:.4g}", str(len(self.samples)), "")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ImportanceTable(Document):
    """I of the paper. The importance of an entry is its mean score minus `base`, the score of the original network.

    A table with a flag 0 (no activation at an end of a block) poses the extended problem of Appendix B, any other table
    the plain one. A block has an entry for each of its options, that is for each set of dropped layers and branches.
    `provenance` describes the origin of the scores: task, recipe, seeds. `quantity` names what the scores are, with its
    unit, such as ACCURACY; it is empty if this is not known.
    """

    FORMAT: ClassVar[str] = "depthfold.importance-table"

    network: str = ""
    fingerprint: str = ""
    environment: Environment = field(default_factory=Environment)
    base: float = 0.0
    provenance: str = ""
    quantity: str = field(default="", metadata=SPARSE)
    entries: tuple[Score, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "base", _checked("The base score of the importance table", self.base))
        ordered = tuple(sorted(self.entries, key=lambda entry: (entry.span, entry.dropped)))
        if not ordered:
            raise TableError("The importance table is empty: it needs an entry for every span and its flags.")
        for one, two in pairwise(ordered):
            if (one.span, one.dropped) == (two.span, two.dropped):
                raise TableError(f"The importance table has two entries for {one.name}; give one entry both scores.")
        object.__setattr__(self, "entries", ordered)

    @property
    def depth(self) -> Position:
        """L: the last position that an entry reaches."""
        return max(entry.span.j for entry in self.entries)

    @property
    def importances(self) -> Mapping[FlaggedSpan, float]:
        """The entries that have scores and drop nothing: mean score minus base score."""
        return {block: value for (block, dropped), value in self.options.items() if not dropped}

    @property
    def options(self) -> Mapping[tuple[FlaggedSpan, Drops], float]:
        """The importances of all entries that have scores, by block and by what it drops."""
        return {(entry.span, entry.dropped): entry.mean - self.base for entry in self.entries if entry.samples}

    @property
    def drops(self) -> bool:
        """True if an entry drops a layer or a branch."""
        return any(entry.dropped for entry in self.entries)

    @property
    def extended(self) -> bool:
        """True for the extended problem (Eq. 16), False for the plain one (Eq. 4)."""
        return any(not (entry.span.a and entry.span.b) for entry in self.entries)

    @classmethod
    def read_csv(
        cls, path: str | Path, *, network: str = "", fingerprint: str = "", environment: Environment | None = None
    ) -> Self:
        """Read the columns st,end,st_act,end_act,imp, and dropped and reason if the file has them.

        `imp` is the change of the score, so the base score of the table is 0. `dropped` has the numbers of the dropped
        layers and the ends of the dropped branches, as in "3 5 6:9". Other columns are ignored.
        """
        entries = read_entries(path, COLUMNS, EXTRA, _entry)
        environment = environment or Environment()
        try:
            return cls(network=network, fingerprint=fingerprint, environment=environment, entries=entries)
        except TableError as error:
            raise TableError(f"{path}: {error}") from error

    def write_csv(self, path: str | Path) -> None:
        """Write the importances without their samples, which only a JSON document holds."""
        known = self.options

        def cells(e: Score) -> tuple[object, ...]:
            block = (e.span.i, e.span.j, int(e.span.a), int(e.span.b))
            return (*block, known.get((e.span, e.dropped)), e.dropped.key or None, e.reason)

        write_entries(path, COLUMNS, EXTRA, map(cells, self.entries))

    def __str__(self) -> str:
        scored, dropping = len(self.options), sum(bool(entry.dropped) for entry in self.entries)
        size = count(scored, "flagged span")
        if dropping:  # a block has several entries
            size = f"{count(len(self.entries), 'entry', 'entries')}, {dropping} with dropped layers"
        size += f", {len(self.entries) - scored} without a score" if scored < len(self.entries) else ""
        problem = "extended" if self.extended else "plain"
        where = f"; environment: {self.environment}" if self.environment.stated else ""
        return (
            f"Importance table of {self.network or 'an unnamed network'}: {size}, {count(self.depth, 'layer')}, base "
            f"score {self.base:g}, {problem} problem{where}"
        )

    def _repr_html_(self) -> str:
        return Table((str(self),), HEADER, tuple(entry.row(self.base) for entry in self.entries)).html()

    def __repr__(self) -> str:
        number = len(self.entries)
        size = count(number, "entry", "entries") if self.drops else count(number, "flagged span")
        return f"<ImportanceTable {self.network or '(unnamed)'}: {size}, {count(self.depth, 'layer')}>"


def _checked(what: str, value: object) -> float:
    score = as_float(what, value, TableError, "a finite number")
    if not abs(score) <= LARGEST:  # NaN compares with nothing
        raise TableError(
            f"{what} is {score!r}; expected a finite number, {LARGEST:g} at most. If the training failed, give the "
            "reason instead of scores."
        )
    return score


def _entry(row: Row) -> Score:
    span = FlaggedSpan(*row.ends(), row.flag("st_act"), row.flag("end_act"))
    if row.text("imp") is None and (reason := row.text("reason")):
        return Score(span=span, reason=reason, dropped=_drops(row))
    return Score(span=span, samples=(row.number("imp"),), dropped=_drops(row))


def _drops(row: Row) -> Drops:
    try:
        return Drops.parse(row.text("dropped") or "")
    except PlanError as error:
        raise TableError(f"column 'dropped': {error}") from None
