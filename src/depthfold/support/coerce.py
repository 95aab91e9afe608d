"""Conversion of arguments to the annotated type.

Measurements often come as NumPy numbers and lists. Data classes that hold them convert them to Python numbers and
tuples, so that equal objects compare, hash and print the same. Text and booleans are not numbers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from decimal import Decimal
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from depthfold.errors import DepthfoldError


def as_float(what: str, value: Any, error: type[DepthfoldError], expected: str = "a number") -> float:
    """Return any real number as a float. A number that is too large for a float becomes infinity."""
    if isinstance(value, bool) or not isinstance(value, Real | Decimal):
        raise error(f"{what} must be {expected}, found {value!r}.")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf  # type: ignore[operator]  # a Real can be compared
    except ValueError:  # the signalling NaN of the decimal module
        return math.nan


def as_whole(what: str, value: object, error: type[DepthfoldError], least: int = 1) -> int:
    """Return any integer of at least `least` as an int."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise error(f"{what} must be an integer of at least {least}, found {value!r}.")
    return int(value)


def as_text(what: str, value: object, error: type[DepthfoldError]) -> str:
    if not isinstance(value, str):
        raise error(f"{what} must be text, found {value!r}.")
    return value


def as_path(what: str, value: object, error: type[DepthfoldError]) -> Path:
    if not isinstance(value, str | os.PathLike):
        raise error(f"{what} must be a path, found {value!r:.80}. Pass a string or a pathlib.Path.")
    return Path(value)


def as_tuple(what: str, value: object, error: type[DepthfoldError]) -> tuple[object, ...]:
    """Return a list, an array or another iterable as a tuple."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise error(f"{what} must be a sequence, found {value!r}.")
    return tuple(value)
