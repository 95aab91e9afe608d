"""The importance table I[i, j, a, b]: how the score changes when the activations inside a span are gone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import ClassVar, Self

from depthfold.core.environment import Environment
from depthfold.core.span import FlaggedSpan, Position
from depthfold.errors import TableError
from depthfold.support.coerce import as_float, as_text, as_tuple, as_tuple_of, as_whole
from depthfold.support.csv_table import Row, read_entries, write_rows
from depthfold.support.document import Document
from depthfold.support.text import count

COLUMNS = ("st", "end", "st_act", "end_act", "imp")
LARGEST = 1e100  # far beyond any score; sums and differences of such numbers are still floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One entry: the raw scores (accuracies, say) of the network whose span has lost its inner activations, one for
    each short training, or the reason why it has none. Where they are known, each score has its seed and its learning
    curve: (step, loss, score)."""

    span: FlaggedSpan
    samples: tuple[float, ...] = ()
    reason: str | None = None
    seeds: tuple[int, ...] = ()
    curves: tuple[tuple[tuple[int, float, float], ...], ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.span, FlaggedSpan):
            raise TableError(f"An importance entry is of a FlaggedSpan(i, j, a, b), found {self.span!r}.")
        if self.reason is not None:
            as_text(f"The reason of the importance entry {self.span}", self.reason, TableError)
        samples = as_tuple(f"The scores of {self.span}", self.samples, TableError)
        object.__setattr__(self, "samples", tuple(_checked(f"A score of {self.span}", score) for score in samples))
        if bool(self.samples) == bool(self.reason):
            raise TableError(
                f"The importance entry {self.span} must have scores, or else the reason why it has none; "
                f"found scores {self.samples!r} and reason {self.reason!r}."
            )
        self._check_seeds_and_curves()

    def _check_seeds_and_curves(self) -> None:
        seeds = as_tuple(f"The seeds of {self.span}", self.seeds, TableError)
        curves = as_tuple(f"The learning curves of {self.span}", self.curves, TableError)
        whole = tuple(as_whole(f"A seed of {self.span}", seed, TableError, least=0) for seed in seeds)
        object.__setattr__(self, "seeds", whole)
        object.__setattr__(self, "curves", tuple(_curve(f"A learning curve of {self.span}", curve) for curve in curves))
        for name in ("seeds", "curves"):
            if (known := len(getattr(self, name))) not in (0, len(self.samples)):
                raise TableError(
                    f"The importance entry {self.span} has {len(self.samples)} scores and {known} {name}; expected one "
                    "for each score, or none at all."
                )

    @property
    def mean(self) -> float:
        return self.samples[0] if len(self.samples) == 1 else fmean(self.samples)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ImportanceTable(Document):
    """I of the paper: the importance of an entry is its mean score minus `base`, the score of the original network.

    If an entry has a flag 0, that is, no activation at one of its ends, the table poses the extended problem of
    Appendix B, otherwise the plain one. `provenance` says how the scores came about: task, recipe, seeds.
    """

    FORMAT: ClassVar[str] = "depthfold.importance-table"

    network: str = ""
    fingerprint: str = ""
    environment: Environment = field(default_factory=Environment)
    base: float = 0.0
    provenance: str = ""
    entries: tuple[Score, ...]

    def __post_init__(self) -> None:
        entries = as_tuple_of(Score, "The entries of an importance table", self.entries, TableError)
        if not entries:
            raise TableError("The importance table is empty: it needs an entry for every span and its flags.")
        for name in ("network", "fingerprint", "provenance"):
            as_text(f"The {name} of an importance table", getattr(self, name), TableError)
        object.__setattr__(self, "base", _checked("The base score of the importance table", self.base))
        ordered = tuple(sorted(entries, key=lambda e: (e.span.i, e.span.j, e.span.a, e.span.b)))
        for one, two in pairwise(ordered):
            if one.span == two.span:
                raise TableError(f"The importance table has two entries for {one.span}; give one entry both scores.")
        object.__setattr__(self, "entries", ordered)

    @property
    def depth(self) -> Position:
        """L: the last position that an entry reaches."""
        return max(entry.span.j for entry in self.entries)

    @property
    def importances(self) -> Mapping[FlaggedSpan, float]:
        """The entries that have scores: mean score minus base score."""
        return {entry.span: entry.mean - self.base for entry in self.entries if entry.samples}

    @property
    def extended(self) -> bool:
        """Whether a block may start or end without an activation (eq. opt-ext) or never (eq. opt3)."""
        return any(not (entry.span.a and entry.span.b) for entry in self.entries)

    @classmethod
    def read_csv(
        cls, path: str | Path, *, network: str = "", fingerprint: str = "", environment: Environment | None = None
    ) -> Self:
        """The columns st,end,st_act,end_act,imp; further columns are ignored. `imp` is the change of the score, so
        the base score of a table that was read from CSV is 0."""
        entries = read_entries(path, COLUMNS, ("reason",), _entry)
        if not entries:
            raise TableError(f"{path}: the importance table is empty; expected one line per span below the header.")
        environment = environment or Environment()
        try:
            return cls(network=network, fingerprint=fingerprint, environment=environment, entries=entries)
        except TableError as error:
            raise TableError(f"{path}: {error}") from error

    def write_csv(self, path: str | Path) -> None:
        """The importances without their samples: those live in the JSON document."""
        known = self.importances
        rows = ((e.span.i, e.span.j, int(e.span.a), int(e.span.b), known.get(e.span), e.reason) for e in self.entries)
        if any(entry.reason for entry in self.entries):
            write_rows(path, (*COLUMNS, "reason"), rows)
        else:
            write_rows(path, COLUMNS, (row[:5] for row in rows))

    def __str__(self) -> str:
        scored = len(self.importances)
        without = f", {len(self.entries) - scored} without a score" if scored < len(self.entries) else ""
        problem = "extended" if self.extended else "plain"
        return (
            f"Importance table of {self.network or 'an unnamed network'}: {count(scored, 'flagged span')}{without}, "
            f"{count(self.depth, 'layer')}, base score {self.base:g}, {problem} problem; "
            f"environment: {self.environment}"
        )

    def __repr__(self) -> str:
        size = f"{count(len(self.entries), 'flagged span')}, {count(self.depth, 'layer')}"
        return f"<ImportanceTable {self.network or '(unnamed)'}: {size}>"


def _checked(what: str, value: object) -> float:
    score = as_float(what, value, TableError, "a finite number")
    if not abs(score) <= LARGEST:  # NaN compares with nothing
        raise TableError(
            f"{what} is {score!r}; expected a finite number, {LARGEST:g} at most. An entry whose training failed, or "
            "which is out of the question, has a reason instead of scores."
        )
    return score


def _curve(what: str, value: object) -> tuple[tuple[int, float, float], ...]:
    points = []
    for point in as_tuple(what, value, TableError):
        parts = as_tuple(f"A point of {what[0].lower()}{what[1:]}", point, TableError)
        if len(parts) != 3:
            raise TableError(f"{what} has the point {point!r:.80}; expected (step, loss, score).")
        step, loss, score = parts
        whole = as_whole(f"{what}: a step", step, TableError, least=0)
        points.append((whole, _checked(f"{what}: a loss", loss), _checked(f"{what}: a score", score)))
    return tuple(points)


def _entry(row: Row) -> Score:
    span = FlaggedSpan(*row.ends(), row.flag("st_act"), row.flag("end_act"))
    if row.text("imp") is None and (reason := row.text("reason")):
        return Score(span=span, reason=reason)
    return Score(span=span, samples=(row.number("imp"),))
