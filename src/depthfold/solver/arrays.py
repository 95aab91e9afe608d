"""The tables as arrays, and the lattice on which their sums are exact."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from depthfold.core import FlaggedSpan, Position, Span

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
Bools = NDArray[np.bool_]


def latency_array(times: Mapping[Span, float], depth: Position) -> Floats:
    """T[i, j], infinite where there is no such span."""
    table = np.full((depth + 1, depth + 1), np.inf)
    if times:
        table[[span.i for span in times], [span.j for span in times]] = list(times.values())
    return table


def importance_array(importances: Mapping[FlaggedSpan, float], depth: Position) -> Floats:
    """I[a, b, i, j], minus infinity where there is no such block."""
    table = np.full((2, 2, depth + 1, depth + 1), -np.inf)
    if importances:
        keys = np.array([(span.a, span.b, span.i, span.j) for span in importances], dtype=np.intp).T
        table[tuple(keys)] = list(importances.values())
    return table


def lattice_exponent(table: Floats) -> int:
    """The q for which every sum along a chain of this table is exact in double precision, in units of 2^-q.

    In plain floating point a sum depends on its order, so that two plans with the same S get latencies that differ
    in the last digit, and each would seem to beat the other. On the lattice equal is equal. A chain has at most L
    entries, so every sum stays below 2^52 units; a unit is about 1e-15 of the largest possible sum.
    """
    known = np.abs(table[np.isfinite(table)])
    largest = float(known.max()) if known.size else 0.0
    # frexp: largest < 2^exponent; bit_length: L < 2^bits.
    return 52 - math.frexp(largest)[1] - int(table.shape[-1]).bit_length()


def on_lattice(table: Floats, exponent: int, rounding: Any) -> Floats:
    """The table in whole units of 2^-exponent. Latencies are rounded up (np.ceil), importances to the nearest."""
    # In two steps, because 2^exponent itself may be too large for a float where the entries are tiny.
    half = exponent // 2
    scaled: Floats = rounding(np.ldexp(np.ldexp(table, half), exponent - half))
    return scaled


def from_lattice(value: float, exponent: int) -> float:
    return math.ldexp(value, -exponent)
