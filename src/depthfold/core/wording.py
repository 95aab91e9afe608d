"""How numbers and errors are put into sentences."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Context
from fractions import Fraction

_LONGEST = 300  # characters of a reason: some libraries add a whole stack of their own


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def at_most(value: float) -> str:
    """Four digits, rounded up: what is printed as a bound is one."""
    return f"{float(Context(prec=4, rounding=ROUND_CEILING).create_decimal_from_float(value)):.4g}"


def share_at_least(part: float, whole: float) -> str:
    """In per cent, rounded up to a tenth: asked for as a budget, it admits what takes `part`."""
    tenths = math.ceil(Fraction(part) / Fraction(whole) * 1000)
    return f"{tenths // 10}.{tenths % 10}%"


def one_line(error: BaseException) -> str:
    """The message of an error, without its line breaks, in a length that a table can show."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
