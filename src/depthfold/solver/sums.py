"""The exact sums of many rows at once, as floats: rounded to the nearest, or up."""

from __future__ import annotations

import math

import numpy as np

from depthfold.solver.arrays import Floats


def rounded_to_nearest(rows: Floats) -> list[float]:
    """What math.fsum gives for each row."""
    found: list[float] = _sums(rows)[0].tolist()
    return found


def rounded_up(rows: Floats) -> list[float]:
    """The smallest float that is not below the exact sum of a row: what `sum_rounded_up` gives."""
    nearest, beyond = _sums(rows)
    found: list[float] = np.where(beyond > 0, np.nextafter(nearest, np.inf), nearest).tolist()
    return found


def _sums(rows: Floats) -> tuple[Floats, Floats]:
    """The floats nearest to the exact sums, and how much more than that the sums are.

    Column by column, with what every addition drops carried in a second float. Where even that one drops something,
    which takes numbers of very different size, the row is summed again by fsum.
    """
    total, dropped = np.zeros(len(rows)), np.zeros(len(rows))
    exact = np.ones(len(rows), dtype=bool)
    for column in np.ascontiguousarray(rows.T):
        total, error = _two_sum(total, column)
        dropped, again = _two_sum(dropped, error)
        exact &= again == 0
    nearest, beyond = _two_sum(total, dropped)
    for n in np.flatnonzero(~exact).tolist():
        row = rows[n].tolist()
        nearest[n] = math.fsum(row)
        beyond[n] = math.fsum([*row, -nearest[n]])
    return nearest, beyond


def _two_sum(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """Knuth's: the float nearest to a + b, and the rest of it, exactly."""
    total = a + b
    other = total - a
    rest: Floats = (a - (total - other)) + (b - other)
    return total, rest
