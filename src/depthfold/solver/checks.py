"""Checks that the two tables fit the network and each other, and that no entry is missing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from depthfold.core import BlockOption, ConvShape, FlaggedSpan, ImportanceTable, LatencyTable, Network, Position, Span
from depthfold.errors import InvalidValue, TableError
from depthfold.stage_one import Shapes, check_shapes, other_network
from depthfold.support.text import listed

SHOWN = 5
LONGEST = 1000  # layers of a span


def check_tables(latency: LatencyTable, importance: ImportanceTable, network: Network | None = None) -> None:
    """Raise TableError if the tables are not of one network and one environment, or if an entry is missing."""
    _check_kinds(latency, importance, network)
    if network is not None:
        _check_network("latency", latency, network)
        _check_network("importance", importance, network)
    _check_same_network(latency, importance)
    if differences := latency.environment.differences(importance.environment):
        raise TableError(
            f"The importance table is of another environment than the latency table: {'; '.join(differences)}. "
            "Measure one of them again, or leave the field out of the importance table if the scores do not depend on "
            "it."
        )
    if at_zero := [entry.span for entry in importance.entries if entry.span.i == 0 and not entry.span.a]:
        raise TableError(
            f"The importance table has {listed(at_zero, SHOWN)}, but the flag at position 0, the input of the network, "
            "is always 1. Enter 1 for its start."
        )
    timed = {(entry.span.i, entry.span.j) for entry in latency.entries}
    scored = {(entry.span.i, entry.span.j) for entry in importance.entries}
    depths = ""
    if latency.depth != importance.depth:
        depths = f" (the latency table ends at position {latency.depth}, the importance table at {importance.depth})"
    _refuse_missing("latency", [Span(i, j) for i, j in sorted(scored - timed)], "importance table", depths)
    _refuse_missing("importance", [Span(i, j) for i, j in sorted(timed - scored)], "latency table", depths)
    if network is not None:
        check_fit(latency, importance, network)


def check_importance(importance: ImportanceTable, network: Network) -> None:
    """Raise TableError if the importance table does not fit the network, before anything is timed."""
    _check_network("importance", importance, network)
    _check_blocks(importance, network)


def check_fit(latency: LatencyTable, importance: ImportanceTable, network: Network) -> None:
    """Raise TableError if a table has an entry that the network cannot have, or lacks a flagged span."""
    for span in dict.fromkeys(entry.span for entry in latency.entries):
        if refusal := network.why_not(span):
            raise TableError(
                f"The latency table has {span}, which does not merge in this network: {refusal.why}. Remove the "
                "entry, or pass the network that was measured."
            )
    _check_blocks(importance, network)
    # A plain table has (i, j, 1, 1) for every timed span and nothing else.
    if importance.extended:
        # With the exclusion rule, which gives the smaller set of flags, so that a table of either space passes.
        timed = {entry.span for entry in latency.entries}
        present = {score.span for score in importance.entries}
        expected = [block for block in network.flagged_spans("full", exclusion=True) if block.span in timed]
        _refuse_missing("importance", [block for block in expected if block not in present], "network")


def check_options(latency: LatencyTable, importance: ImportanceTable, shapes: Shapes) -> None:
    """Raise TableError if entries with dropped layers do not fit the network or the other table."""
    network = shapes.network
    for span, shape in ((entry.span, entry.shape) for entry in latency.entries):
        whole = shapes.shape(span.i, span.j, 0)
        if shape is not None and whole is not None and not _may_become(whole, shape):
            why = "is the shape of all its layers. Leave the shape out"
            if shape != whole:
                why = f"it cannot become. In this network, all layers of the span are {whole}"
            raise TableError(f"The latency table has {span} as {shape}, which {why}.")
    for score in importance.entries:
        if not score.dropped:
            continue
        layers, branches = set(score.dropped.layers), set(score.dropped.branches)
        if not (layers <= network.droppable_layers and branches <= network.droppable_branches):
            raise TableError(
                f"The importance table has {score.name}, but not all of that can be dropped. Drop only layers of "
                "network.droppable_layers and branches of network.droppable_branches."
            )
        if shapes.shape(score.span.i, score.span.j, shapes.mask(score.dropped)) is None:
            raise TableError(
                f"The importance table has {score.name}, but then a residual does not fit into the kernel of its "
                "branch. Remove the entry."
            )
    check_shapes(latency, shapes, (BlockOption(score.span, score.dropped) for score in importance.entries))


def _may_become(whole: ConvShape, shape: ConvShape) -> bool:
    """Return False if dropping layers that keep channels and size cannot change the one shape to the other."""
    channels = (shape.in_channels, shape.out_channels) == (whole.in_channels, whole.out_channels)
    return channels and shape.stride == whole.stride and shape != whole


def check_timed(latency: LatencyTable) -> None:
    """Raise TableError if the spans of the latency table do not lead from 0 to L, or if one is implausibly long.

    Stage one takes memory in proportion to L^2, so this is checked before.
    """
    reached = {0}
    for span in latency.times:  # sorted: all spans that end at i come before those that start there
        if len(span) > LONGEST:
            raise TableError(
                f"The latency table has {span}, which merges {len(span)} layers; more than {LONGEST} are not "
                "plausible. Correct its end, or remove the entry."
            )
        if span.i in reached:
            reached.add(span.j)
    _check_reached("latency", "them", reached, latency.depth)


def check_scored(blocks: Iterable[FlaggedSpan], L: int) -> None:
    """Raise TableError if the blocks of the importance table do not lead from 0 to L with matching flags."""
    reached = {(0, True)}
    for block in sorted(blocks, key=lambda block: block.i):  # all blocks that end at i start before it
        if (block.i, block.a) in reached:
            reached.add((block.j, block.b))
    _check_reached("importance", "blocks with matching flags", {position for position, _ in reached}, L)


def _check_reached(table: str, chain: str, reached: Set[Position], L: int) -> None:
    if L not in reached:
        last = max(reached)
        raise TableError(
            f"The spans of the {table} table do not cover the network: no chain of {chain} leads from position 0 to "
            f"{L}; the furthest position reached is {last}. Add an entry that starts at or before {last} and ends "
            "after it."
        )


def no_plan() -> TableError:
    """Return the error for tables that each cover the network, but not together."""
    return TableError(
        "No plan fits both tables: for every chain of blocks in the importance table, the latency table lacks the "
        "times to merge between its activations. Time the spans that have a reason instead of a time."
    )


def _check_kinds(latency: object, importance: object, network: object) -> None:
    if isinstance(latency, ImportanceTable) and isinstance(importance, LatencyTable):
        raise InvalidValue("The two tables are swapped: solve() takes the latency table first, solve(T, I).")
    for value, kind, name in ((latency, LatencyTable, "latency table"), (importance, ImportanceTable,
                              "importance table"), (network, Network | None, "network")):  # fmt: skip
        if not isinstance(value, kind):
            raise InvalidValue(
                f"solve() takes a LatencyTable, an ImportanceTable and a Network; found {type(value).__name__} as "
                f"{name}."
            )


def _check_network(name: str, table: LatencyTable | ImportanceTable, network: Network) -> None:
    if table.fingerprint not in ("", network.fingerprint) or table.depth > network.depth:
        raise other_network(name, table, network)
    # Every search space has the single layers.
    missing = [Span(l - 1, l) for l in range(table.depth + 1, network.depth + 1)]
    _refuse_missing(name, missing, "network", f" (the table ends at position {table.depth} of {network.depth})")


def _check_blocks(importance: ImportanceTable, network: Network) -> None:
    extended = importance.extended
    for block in dict.fromkeys(score.span for score in importance.entries):
        _check_flags(block, network, extended)


def _check_flags(block: FlaggedSpan, network: Network, extended: bool) -> None:
    for position, flag in ((block.i, block.a), (block.j, block.b)):
        if why := _why_not(position, flag, network, extended):
            raise TableError(
                f"The importance table has {block}, but the flag at {position} cannot be {int(flag)}: {why}. Measure "
                "it again with the flags of network.flagged_spans()."
            )


def _why_not(position: Position, flag: bool, network: Network, extended: bool) -> str | None:
    """Return the reason why no plan can have this flag at the position, None if one can or the position is 0."""
    if position == 0:
        return None
    if not flag:
        return "the network has its own activation there, which stays" if position in network.activations else None
    if not network.activations:
        return "the network has no activation to copy"
    if position in network.activations:
        return None
    if not extended:  # a table with all flags 1 puts an activation at the end of every block
        return None
    if network.ends_in_output and position == network.depth:
        return "it is the network's output, and an activation would cut off a part of its range, so none is inserted"
    if position in network.barriers:
        return "it is a barrier without an activation, and nothing merges across it, so none is inserted there"
    return None


def _refuse_missing(table: str, missing: Sequence[Span | FlaggedSpan], expected_by: str, hint: str = "") -> None:
    if missing:
        raise TableError(
            f"The {table} table has no entry for {listed(missing, SHOWN)}, which the {expected_by} has{hint}. Measure "
            "it, or enter it with the reason why it has no value."
        )


def _check_same_network(latency: LatencyTable, importance: ImportanceTable) -> None:
    # One network may have two names, so names count only if a table has no fingerprint.
    known = latency.fingerprint and importance.fingerprint
    what = "fingerprint" if known else "network"
    mine, theirs = getattr(importance, what), getattr(latency, what)
    if mine and theirs and mine != theirs:
        raise TableError(
            f"The importance table is of another network than the latency table: {'fingerprint' if known else 'name'} "
            f"{mine!r} against {theirs!r}. Measure both on the same network."
        )
