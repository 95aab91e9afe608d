"""How numbers and errors are put into sentences."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable
from decimal import ROUND_CEILING, Context
from fractions import Fraction

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # some libraries write for a terminal, wherever they write
_LONGEST = 300  # characters of a reason: some libraries add a whole stack of their own


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def amount(number: float) -> str:
    """Four digits and how many of what: 78.51 k, 3.505 M, 15.47 G."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.99995 * size:  # what would be rounded to 1000 of the next smaller ones
            return f"{number / size:.4g} {unit}"
    return f"{number:.4g}"


def at_most(value: float) -> str:
    """Four digits, rounded up: what is printed as a bound is one."""
    return f"{float(Context(prec=4, rounding=ROUND_CEILING).create_decimal_from_float(value)):.4g}"


def share_at_least(part: float, whole: float) -> str:
    """In per cent, rounded up to a tenth: asked for as a budget, it admits what takes `part`."""
    tenths = math.ceil(Fraction(part) / Fraction(whole) * 1000)
    return f"{tenths // 10}.{tenths % 10}%"


def one_line(error: BaseException) -> str:
    """The message of an error, without its line breaks, in a length that a table can show."""
    text = " ".join(_COLOURS.sub("", str(error)).split()) or type(error).__name__
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def did_you_mean(
    name: str, known: Iterable[str], form: Callable[[str], str] = repr, *, most: int = 1, cutoff: float = 0.6
) -> str:
    """ "Did you mean 'a'? " (with a space, for what follows) if some of the known names are close, otherwise nothing.
    `form` says how each of them is written."""
    close = difflib.get_close_matches(name, list(known), n=most, cutoff=cutoff)
    return f"Did you mean {' or '.join(map(form, close))}? " if close else ""
