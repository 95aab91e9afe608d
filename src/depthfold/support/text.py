"""Numbers, errors and suggestions as text for messages."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # some libraries use terminal colours in their messages
_LONGEST = 300  # characters; some messages contain a whole stack trace
_UNITS = ((" T", 1e12), (" G", 1e9), (" M", 1e6), (" k", 1e3))


def count(number: int, noun: str, plural: str | None = None) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + 's'}"


def listed(items: Sequence[object], most: int, separator: str = ", ") -> str:
    """Return the first `most` items, and how many more there are: "a, b and 3 more"."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return separator.join(map(str, items[:most])) + more


def amount(number: float, digits: int = 4) -> str:
    """Format a number with a unit and some digits: 78.51 k, 3.505 M, 15.47 G. With two digits: 3.5 M, 351 M."""
    full = 1 - 0.5 * 10 ** -max(digits, 3)  # from here on, a unit is rounded to 1, and the one below it to 1000
    unit, size = next(((unit, size) for unit, size in _UNITS if number >= full * size), ("", 1.0))
    value = number / size
    whole = value >= 10**digits - 0.5  # :g would write an exponent
    return f"{value:.0f}{unit}" if whole else f"{value:.{digits}g}{unit}"


def duration(seconds: float) -> str:
    """Return a rough time as text."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.2g} {unit}"
    return f"{max(seconds, 1):.0f} s"


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table with aligned columns."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    for row in (header, ["-" * width for width in widths], *rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def one_line(error: BaseException) -> str:
    """Return the message of an error without line breaks and terminal colours, of limited length."""
    text = " ".join(_COLOURS.sub("", str(error)).split()) or type(error).__name__
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def did_you_mean(
    name: str, known: Iterable[str], form: Callable[[str], str] = repr, *, most: int = 1, cutoff: float = 0.6
) -> str:
    """Return "Did you mean 'a'? ", with a trailing space, or an empty string if no known name is similar.

    `form` formats each suggestion.
    """
    close = difflib.get_close_matches(name, list(known), n=most, cutoff=cutoff)
    return f"Did you mean {' or '.join(map(form, close))}? " if close else ""
