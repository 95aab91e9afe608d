"""Do the two tables belong together, and is anything missing? Every problem has a message of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from depthfold.core import FlaggedSpan, ImportanceTable, LatencyTable, Network, Position, Span, fingerprint
from depthfold.errors import TableError
from depthfold.solver.arrays import Floats

SHOWN = 5


def check_tables(latency: LatencyTable, importance: ImportanceTable, network: Network | None) -> None:
    """Raises TableError if the tables are not of one network and one environment, or if an entry is missing."""
    _check_network("importance table", importance, "latency table", latency)
    if differences := latency.environment.differences(importance.environment):
        raise TableError(
            f"The importance table is of another environment than the latency table: {'; '.join(differences)}. "
            "Measure one of them again; what an importance does not depend on (the machine, say) its table may leave "
            "out."
        )
    if network is not None:
        _check_fits(latency, network)
    timed = {(entry.span.i, entry.span.j) for entry in latency.entries}
    scored = {(entry.span.i, entry.span.j) for entry in importance.entries}
    _refuse("latency", [Span(i, j) for i, j in sorted(scored - timed)], "importance")
    _refuse("importance", [Span(i, j) for i, j in sorted(timed - scored)], "latency")
    if network is not None:
        # With the exclusion rule, which only ever leaves entries out: both search spaces pass.
        expected = [f for f in network.flagged_spans("full", exclusion=True) if (f.i, f.j) in timed]
        present = {entry.span for entry in importance.entries}
        _refuse("importance", [block for block in expected if block not in present], "network")


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


def _check_network(
    what: str, one: ImportanceTable | LatencyTable, other_what: str, other: ImportanceTable | LatencyTable
) -> None:
    for name, mine, theirs in (
        ("name", one.network, other.network),
        ("fingerprint", one.fingerprint, other.fingerprint),
        ("depth", one.depth, other.depth),
    ):
        if mine != theirs and mine and theirs:
            raise TableError(
                f"The {what} is of another network than the {other_what}: {name} {mine!r} against {theirs!r}. "
                "Measure both on the same network."
            )


def _check_fits(latency: LatencyTable, network: Network) -> None:
    own = fingerprint(network)
    if latency.fingerprint not in ("", own) or latency.depth != network.depth:
        raise TableError(
            f"The tables are not of the network {network.name!r}: it has {network.depth} layers and fingerprint "
            f"{own!r}, the latency table has {latency.depth} and {latency.fingerprint!r}."
        )
    for entry in latency.entries:
        if refusal := network.why_not(entry.span):
            raise TableError(
                f"The latency table has {entry.span}, which does not merge in this network: {refusal.why}."
            )


def _refuse(table: str, missing: Sequence[Span | FlaggedSpan], expected_by: str) -> None:
    if missing:
        more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        raise TableError(
            f"The {table} table has no entry for {', '.join(map(str, missing[:SHOWN]))}{more}, which the {expected_by}"
            f"{'' if expected_by == 'network' else ' table'} has. Measure it, or enter it with the reason why it has "
            "no value."
        )


def _not_covered(table: str, reached: Position, L: Position) -> None:
    raise TableError(
        f"The spans of the {table} table do not cover the network: no chain of them leads from position 0 to {L}; the "
        f"furthest position reached is {reached}. Is a span missing that starts at or before {reached} and ends "
        "behind it?"
    )
