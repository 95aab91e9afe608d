"""Do the tables fit the network that is given with them?"""

from __future__ import annotations

from depthfold.core import FlaggedSpan, ImportanceTable, LatencyTable, Network, Position, Span
from depthfold.errors import InvalidValue, TableError
from depthfold.solver.checks import Table, refuse_missing
from depthfold.solver.resolution import check_base


def check_network(latency: LatencyTable, importance: ImportanceTable, network: Network) -> None:
    """Raises TableError if one of the tables is of another network, or does not reach its end."""
    if not isinstance(network, Network):
        raise InvalidValue(
            f"solve() takes a Network, found {type(network).__name__}. Give traced.network, where traced is the result "
            "of trace()."
        )
    own = network.fingerprint
    for name, table in (("latency", latency), ("importance", importance)):
        _check_network(name, table, network, own)


def check_importance(importance: ImportanceTable, network: Network) -> None:
    """The same of an importance table alone, as far as can be said before anything is timed."""
    _check_network("importance", importance, network, network.fingerprint)
    check_base(importance)
    _check_blocks(importance, network)


def check_fit(latency: LatencyTable, importance: ImportanceTable, network: Network) -> None:
    """Raises TableError if a table has what the network cannot do, or lacks a flagged span that it has."""
    for entry in latency.entries:
        if refusal := network.why_not(entry.span):
            raise TableError(
                f"The latency table has {entry.span}, which does not merge in this network: {refusal.why}."
            )
    _check_blocks(importance, network)
    # A plain table has (i, j, 1, 1) and nothing else, and that for every span that is timed: nothing more to ask for.
    if importance.extended:
        # With the exclusion rule, which only ever leaves entries out: both search spaces pass.
        timed = {entry.span for entry in latency.entries}
        present = {score.span for score in importance.entries}
        expected = [block for block in network.flagged_spans("full", exclusion=True) if block.span in timed]
        refuse_missing("importance", [block for block in expected if block not in present], "network")


def _check_network(name: str, table: Table, network: Network, own: str) -> None:
    if table.fingerprint not in ("", own) or table.depth > network.depth:
        raise TableError(
            f"The {name} table is not of the network {network.name!r}: the network has {network.depth} layers and "
            f"fingerprint {own!r}, the table {table.depth} and {table.fingerprint or 'none'!r}. Measure it again, or "
            "give the network that it was measured on."
        )
    # Whatever the search space is, it has the single layers.
    missing = [Span(l - 1, l) for l in range(table.depth + 1, network.depth + 1)]
    refuse_missing(name, missing, "network", f" The table ends at position {table.depth} of {network.depth}.")


def _check_blocks(importance: ImportanceTable, network: Network) -> None:
    for score in importance.entries:
        _check_flags(score.span, network, importance.extended)


def _check_flags(block: FlaggedSpan, network: Network, extended: bool) -> None:
    for position, flag in ((block.i, block.a), (block.j, block.b)):
        if why := _why_not(position, flag, network, extended):
            raise TableError(
                f"The importance table has {block}, but the flag at {position} cannot be {int(flag)}: {why}. Measure "
                "it again with the flags of network.flagged_spans()."
            )


def _why_not(position: Position, flag: bool, network: Network, extended: bool) -> str | None:
    """Why no plan can have this flag there; position 0 is none of our business here."""
    if position == 0:
        return None
    if not flag:
        return "the network has its own activation there, which stays" if position in network.activations else None
    if not network.activations:
        return "the network has no activation at all whose kind could be inserted"
    if position in network.activations:
        return None
    if not extended:  # in the plain problem every block lies between activations, at a barrier and at the end, too
        return None
    if network.ends_in_output and position == network.depth:
        return "it is the network's output, and an activation would cut off a part of its range, so none is inserted"
    if position in network.barriers:
        return "it is a barrier without an activation, and nothing merges across it, so none is inserted there"
    return None
