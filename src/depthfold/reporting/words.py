"""How figures are put before a reader: the same number of digits, units and signs everywhere on the page."""

from __future__ import annotations

import re
from collections.abc import Iterable

from depthfold.core import ConvShape, Network, Span
from depthfold.reporting.findings import Evaluation
from depthfold.support import text as wording

MINUS = "\N{MINUS SIGN}"
NARROW = "\N{NARROW NO-BREAK SPACE}"


def number(value: float, digits: int = 4) -> str:
    """So many significant digits, with a true minus sign, and never an exponent for what a person can read."""
    text = f"{value:.{digits}g}"
    if "e" in text and 1e-5 <= abs(value) < 1e9:
        text = f"{value:,.0f}" if abs(value) >= 1 else f"{value:.{digits + 4}f}".rstrip("0")
    return text.replace("-", MINUS)


def ms(value: float) -> str:
    """Four digits, zeros included, so that 17.60 stands beside 17.91."""
    text = f"{value:#.4g}".rstrip(".").replace("-", MINUS)
    return f"{number(value) if 'e' in text else text}{NARROW}ms"


def per_cent(share: float) -> str:
    return f"{100 * share:.1f}{NARROW}%".replace("-", MINUS)


def signed_per_cent(share: float) -> str:
    return f"{100 * share:+.1f}{NARROW}%".replace("-", MINUS)


def times(factor: float) -> str:
    return f"{factor:.2f}\N{MULTIPLICATION SIGN}"


def amount(count: float) -> str:
    return wording.amount(count).replace(" ", NARROW)


def megabytes(size: int) -> str:
    return f"{number(size / 1e6)}{NARROW}MB"


def score(evaluation: Evaluation) -> str:
    return f"{100 * evaluation.score:.2f}{NARROW}%" if evaluation.share else number(evaluation.score)


def uncertainty(evaluation: Evaluation) -> str | None:
    """How sure a score is, as far as it is known."""
    unit, scale = (" points", 100) if evaluation.share else ("", 1)
    images = None if evaluation.images is None else f"{evaluation.images:,} images"
    if evaluation.spread is not None:
        on = f", {images}" if images else ""
        return f"± {number(scale * evaluation.spread, 2)}{unit} over trainings{on}"
    if evaluation.standard_error is not None:
        return f"± {number(scale * evaluation.standard_error, 2)}{unit} standard error, {images}"
    return images


def change(before: Evaluation, after: Evaluation) -> str:
    """The difference of two scores, in points where they are shares."""
    difference = after.score - before.score
    text = f"{100 * difference:+.2f} points" if before.share else f"{difference:+.4g}"
    return text.replace("-", MINUS)


def shape(convolution: ConvShape) -> str:
    """A convolution as it prints itself, with the signs that a page has and a terminal may not."""
    return re.sub(r"(?<=\d)x(?=\d)", "\N{MULTIPLICATION SIGN}", str(convolution)).replace("->", "\N{RIGHTWARDS ARROW}")


def layers(network: Network, span: Span) -> str:
    """Which layers a span holds, by number and by name."""
    first, last = span.layers[0], span.layers[-1]
    if first == last:
        return f"layer {first} ({network.layers[first - 1].where})"
    return f"layers {first} to {last} ({network.layers[first - 1].where} to {network.layers[last - 1].where})"


def listed(items: Iterable[str]) -> str:
    """One, two and three."""
    *most, last = items
    return f"{', '.join(most)} and {last}" if most else last
