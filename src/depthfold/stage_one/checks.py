"""Checks that a table fits the network."""

from __future__ import annotations

from collections.abc import Iterable

from depthfold.core import BlockOption, ImportanceTable, LatencyTable, Network
from depthfold.errors import TableError
from depthfold.stage_one.shapes import Shapes


def check_network(network: Network, latency: LatencyTable) -> None:
    """Raise TableError if the latency table is of another network."""
    if latency.fingerprint not in ("", network.fingerprint) or latency.depth != network.depth:
        raise other_network("latency", latency, network)


def other_network(name: str, table: LatencyTable | ImportanceTable, network: Network) -> TableError:
    """Return the error for a table that was measured on another network."""
    return TableError(
        f"The {name} table is not of the network {network.name!r}: the network has {network.depth} layers and "
        f"fingerprint {network.fingerprint!r}, the table {table.depth} and {table.fingerprint or 'none'!r}. Measure it "
        "again, or give the network that it was measured on."
    )


def check_shapes(latency: LatencyTable, shapes: Shapes, options: Iterable[BlockOption]) -> None:
    """Raise TableError if the latency table has no entry for what is left of a block. One with a reason is enough."""
    timed = {(entry.span, entry.shape) for entry in latency.entries}
    for block, dropped in options:
        span, mask = block.span, shapes.mask(dropped)
        if not dropped or shapes.is_empty(span.i, span.j, mask):
            continue
        shape = shapes.shape(span.i, span.j, mask)
        key = None if shape == shapes.shape(span.i, span.j, 0) else shape
        if (span, key) not in timed:
            raise TableError(
                f"The latency table has no entry for {span} as {shape}, which is left without {dropped}. Measure it "
                "with measure_latency(..., moves=...), or depthfold latency --moves ..., or enter it with the reason "
                "why it has no value."
            )
