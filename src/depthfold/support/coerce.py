"""What the constructors of the nouns take, and what they make of it.

A measurement comes from other programs: its numbers are NumPy's as often as Python's, and lists stand where the nouns
hold tuples. Both are taken, and turned into what the annotation says, so that equal nouns are equal, hash and print
alike. Text and flags are no numbers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from decimal import Decimal
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

from depthfold.errors import DepthfoldError

T = TypeVar("T")


def as_float(what: str, value: Any, error: type[DepthfoldError], expected: str = "a number") -> float:
    """Any real number as a float; one too large for a float is infinite, for the caller to refuse."""
    if isinstance(value, bool) or not isinstance(value, Real | Decimal):
        raise error(f"{what} must be {expected}, found {value!r}.")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf  # type: ignore[operator]  # a Real has an order
    except ValueError:  # the signalling NaN of decimal
        return math.nan


def as_whole(what: str, value: object, error: type[DepthfoldError], least: int = 1) -> int:
    """Any whole number from the least on as an int."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise error(f"{what} must be a whole number from {least} on, found {value!r}.")
    return int(value)


def as_text(what: str, value: object, error: type[DepthfoldError]) -> str:
    if not isinstance(value, str):
        raise error(f"{what} must be text, found {value!r}.")
    return value


def as_path(what: str, value: object, error: type[DepthfoldError]) -> Path:
    if not isinstance(value, str | os.PathLike):
        raise error(f"{what} must be a path, found {value!r:.80}. Give it as text, or as a pathlib.Path.")
    return Path(value)


def as_tuple(what: str, value: object, error: type[DepthfoldError]) -> tuple[object, ...]:
    """A list, an array or any other row of things as a tuple."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise error(f"{what} must be several values in a row, found {value!r}.")
    return tuple(value)


def as_tuple_of(kind: type[T], what: str, value: object, error: type[DepthfoldError]) -> tuple[T, ...]:
    items = as_tuple(what, value, error)
    for item in items:
        if not isinstance(item, kind):
            raise error(f"{what} must all be of the kind {kind.__name__}, found {item!r}.")
    return items  # type: ignore[return-value]  # every item was looked at
