"""The tables as arrays, and the lattice on which their sums are exact.

In plain floating point a sum depends on its order, so that two plans with the same S get latencies that differ in the
last digit, and each would seem to beat the other. On a lattice of steps 2^-q equal is equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from depthfold.core import FlaggedSpan, LatencyTable, Position

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
Bools = NDArray[np.bool_]


def latency_array(latency: LatencyTable) -> Floats:
    """T[b, i, j]: what a span takes without an activation at its end (b = 0) and with one, infinite where there is no
    such span."""
    size = latency.depth + 1
    T = np.full((2, size, size), np.inf)
    for table, times in zip(T, (latency.times_if(False), latency.times_if(True)), strict=True):
        if times:
            table[[span.i for span in times], [span.j for span in times]] = list(times.values())
    return T


def importance_array(importances: Mapping[FlaggedSpan, float], depth: Position) -> Floats:
    """I[a, b, i, j], minus infinity where there is no such block."""
    table = np.full((2, 2, depth + 1, depth + 1), -np.inf)
    if importances:
        keys = np.array([(span.a, span.b, span.i, span.j) for span in importances], dtype=np.intp).T
        table[tuple(keys)] = list(importances.values())
    return table


def lattice_exponent(table: Floats) -> int:
    """The q for which every sum along a chain of this table is exact in double precision, in units of 2^-q.

    A chain has at most L entries, so every sum stays below 2^52 units. A unit is at most 2^-45 (3e-14) of the largest
    entry for up to 62 layers, at most 2^-43 (1.2e-13) for up to 254.
    """
    known = np.abs(table[np.isfinite(table)])
    largest = float(known.max()) if known.size else 0.0
    # frexp: largest < 2^exponent; bit_length: L < 2^bits.
    return 52 - math.frexp(largest)[1] - int(table.shape[-1]).bit_length()


def on_lattice(table: Floats, exponent: int) -> Floats:
    """The table in whole units of 2^-exponent, to the nearest: an entry is off by half a unit at most, so a sum of L
    entries by L/2 units. Good enough to tell importances apart."""
    return np.rint(_scaled(table, exponent))


def from_lattice(value: float, exponent: int) -> float:
    return math.ldexp(value, -exponent)


@dataclass(frozen=True, slots=True)
class Exact:
    """Latencies without any rounding: whole `units` of 2^-q, and a `rest` in [0, 1) in steps of 2^-52 units.

    Budgets are kept to the last bit, so latencies are compared to the last bit. An entry has 53 bits, so every entry
    of at least one unit fits: nothing is rounded while the entries span less than 13 orders of magnitude (for up to
    100 layers). What is smaller than a unit is rounded up to a step.
    """

    units: Floats
    rest: Floats

    @classmethod
    def of(cls, table: Floats) -> Exact:
        """Only what is on one lattice may be added: tables whose entries meet in a sum are given as one array."""
        scaled = _scaled(table, lattice_exponent(table))
        units = np.floor(scaled)
        fraction = np.where(np.isfinite(table), scaled, 0.0) - np.where(np.isfinite(table), units, 0.0)
        return cls._carried(units, np.ldexp(np.ceil(np.ldexp(fraction, 52)), -52))

    def __add__(self, other: Exact) -> Exact:
        return Exact._carried(self.units + other.units, self.rest + other.rest)

    def __getitem__(self, index: Any) -> Exact:
        return Exact(self.units[index], self.rest[index])

    @classmethod
    def stack(cls, one: Exact, two: Exact) -> Exact:
        return cls(np.stack([one.units, two.units]), np.stack([one.rest, two.rest]))

    @classmethod
    def _carried(cls, units: Floats, rest: Floats) -> Exact:
        carry = rest >= 1.0
        return cls(units + carry, rest - carry)


def _scaled(table: Floats, exponent: int) -> Floats:
    # In two steps, because 2^exponent itself may be too large for a float where the entries are tiny.
    half = exponent // 2
    scaled: Floats = np.ldexp(np.ldexp(table, half), exponent - half)
    return scaled
