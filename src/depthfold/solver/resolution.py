"""Does the lattice of the importances tell the plans apart?

Its step is set by the largest entry, so one placeholder (-1e18 for "never") would make all other entries equal, and the
frontier would lose its plans without a word. Where that looms, the entry is named and refused.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from statistics import median

from depthfold.core import FlaggedSpan, ImportanceTable
from depthfold.errors import TableError

# What a sum along L blocks may be off by, as a part of the median entry. A measured importance is known to three
# digits at best.
TOLERANCE = 1e-6
# A base score so many times the usual score leaves no more than half of the digits of their difference.
BASE = 1e8

OUT_OF_THE_QUESTION = "An entry that is out of the question has a reason instead of a value."


def check_base(importance: ImportanceTable) -> None:
    """Raises TableError if a base score that is no score has swallowed the scores."""
    usual = _usual([entry.mean for entry in importance.entries if entry.samples]) if importance.base else 0.0
    if usual and abs(importance.base) > BASE * usual:
        raise TableError(
            f"The base score of the importance table is {importance.base:g}, but its scores are {usual:g} in the "
            "median, so hardly a digit is left of their difference. Give the score of the original network, on the "
            "scale of the other scores."
        )


def check_resolution(raw: Mapping[FlaggedSpan, float], exponent: int, depth: int, alpha: float | None = None) -> None:
    """Raises TableError if a step of the lattice, L times, is not far below the median entry.

    With `alpha` the lattice is that of the normalised table. It, too, is held against the entries as they were given:
    a shift that is far too large makes them look large, and all alike.
    """
    usual = _usual(raw.values())
    if not usual or depth * math.ldexp(1.0, -exponent) <= TOLERANCE * usual:
        return
    if alpha is None:
        span, value = max(raw.items(), key=lambda item: abs(item[1]))
        raise TableError(
            f"The importance of {span} is {value:g}, while the entries are {usual:g} in the median: beside it "
            f"the others could not be told apart. Expected entries of comparable size, here up to "
            f"{_limit(usual, depth):.1g}. {OUT_OF_THE_QUESTION}"
        )
    raise TableError(
        f"With alpha = {alpha!r} the normalisation shifts the importances so far that they cannot be told apart: they "
        f"are {usual:g} in the median. The paper uses 1.2 to 1.8."
    )


def _usual(values: Collection[float]) -> float:
    """The median size of the entries that are not zero; zero if there are none."""
    return median([abs(value) for value in values if value] or [0.0])


def _limit(usual: float, depth: int) -> float:
    """The size from which on an entry is refused, to the power of two below it."""
    return math.ldexp(TOLERANCE * usual / depth, 51 - (depth + 1).bit_length())
