"""How numbers are put into sentences."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Context
from fractions import Fraction


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def at_most(value: float) -> str:
    """Four digits, rounded up: what is printed as a bound is one."""
    return f"{float(Context(prec=4, rounding=ROUND_CEILING).create_decimal_from_float(value)):.4g}"


def share_at_least(part: float, whole: float) -> str:
    """In per cent, rounded up to a tenth: asked for as a budget, it admits what takes `part`."""
    tenths = math.ceil(Fraction(part) / Fraction(whole) * 1000)
    return f"{tenths // 10}.{tenths % 10}%"
