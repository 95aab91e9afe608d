"""Do the two tables belong together, and is anything missing? Every problem has a message of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from depthfold.core import FlaggedSpan, ImportanceTable, LatencyTable, Position, Span
from depthfold.errors import InvalidValue, TableError
from depthfold.solver.arrays import Floats

SHOWN = 5
Table = LatencyTable | ImportanceTable


def check_kinds(latency: object, importance: object) -> None:
    """Raises InvalidValue if solve() was given something else than the two tables, in this order."""
    if isinstance(latency, ImportanceTable) and isinstance(importance, LatencyTable):
        raise InvalidValue("The two tables are swapped: solve() takes the latency table first, solve(T, I).")
    for value, kind, name in ((latency, LatencyTable, "latency"), (importance, ImportanceTable, "importance")):
        if not isinstance(value, kind):
            raise InvalidValue(
                f"The {name} table must be of the kind {kind.__name__}, found {type(value).__name__}. "
                f"{kind.__name__}.read_csv() and .loads() read one."
            )


def check_tables(latency: LatencyTable, importance: ImportanceTable) -> None:
    """Raises TableError if the tables are not of one network and one environment, or if an entry is missing."""
    _check_same_network(latency, importance)
    if differences := latency.environment.differences(importance.environment):
        raise TableError(
            f"The importance table is of another environment than the latency table: {'; '.join(differences)}. "
            "Measure one of them again; what an importance does not depend on (the machine, say) its table may leave "
            "out."
        )
    if at_zero := [entry.span for entry in importance.entries if entry.span.i == 0 and not entry.span.a]:
        raise TableError(
            f"The importance table has {listed(at_zero)}, but at position 0, the input of the network, the flag is 1: "
            "there is no activation that could be missing. Enter 1 for its start."
        )
    timed = {(entry.span.i, entry.span.j) for entry in latency.entries}
    scored = {(entry.span.i, entry.span.j) for entry in importance.entries}
    depths = ""
    if latency.depth != importance.depth:
        depths = (
            f" The latency table ends at position {latency.depth}, the importance table at {importance.depth}: are "
            "both of the same network?"
        )
    refuse_missing("latency", [Span(i, j) for i, j in sorted(scored - timed)], "importance table", depths)
    refuse_missing("importance", [Span(i, j) for i, j in sorted(timed - scored)], "latency table", depths)


def check_covered(T_opt: Floats, I_opt: Floats) -> None:
    """Raises TableError if the spans of a table do not lead from 0 to L."""
    L = len(T_opt) - 1
    if not np.isfinite(T_opt[0, L]):
        _not_covered("latency", int(np.flatnonzero(np.isfinite(T_opt[0])).max()), L)
    blocks = np.isfinite(I_opt[1]).any(axis=0)
    reached = np.arange(L + 1) == 0
    for l in range(1, L + 1):
        reached[l] = (reached[:l] & blocks[:l, l]).any()
    if not reached[L]:
        _not_covered("importance", int(np.flatnonzero(reached).max()), L)


def no_plan() -> TableError:
    return TableError(
        "No plan fits both tables: each covers the network by itself, but wherever the importance table has a chain "
        "of blocks, the latency table lacks the times for merging between its activations. Time the spans that have "
        "a reason instead of a time."
    )


def refuse_missing(table: str, missing: Sequence[Span | FlaggedSpan], expected_by: str, hint: str = "") -> None:
    if missing:
        raise TableError(
            f"The {table} table has no entry for {listed(missing)}, which the {expected_by} has. Measure it, or enter "
            f"it with the reason why it has no value.{hint}"
        )


def listed(spans: Sequence[Span | FlaggedSpan]) -> str:
    more = f" and {len(spans) - SHOWN} more" if len(spans) > SHOWN else ""
    return f"{', '.join(map(str, spans[:SHOWN]))}{more}"


def _check_same_network(latency: LatencyTable, importance: ImportanceTable) -> None:
    # Names are only labels: the same network may bear two of them. They count where there is nothing better.
    known = latency.fingerprint and importance.fingerprint
    what = "fingerprint" if known else "network"
    mine, theirs = getattr(importance, what), getattr(latency, what)
    if mine and theirs and mine != theirs:
        raise TableError(
            f"The importance table is of another network than the latency table: {'fingerprint' if known else 'name'} "
            f"{mine!r} against {theirs!r}. Measure both on the same network."
        )


def _not_covered(table: str, reached: Position, L: Position) -> None:
    raise TableError(
        f"The spans of the {table} table do not cover the network: no chain of them leads from position 0 to {L}; the "
        f"furthest position reached is {reached}. Is a span missing that starts at or before {reached} and ends "
        "behind it?"
    )
