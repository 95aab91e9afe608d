"""Numbers and names as text for the report. The templates use these functions as filters."""

from __future__ import annotations

import re
from collections.abc import Iterable

from depthfold.core import ConvShape, Network, Profile, Span
from depthfold.reporting.findings import Evaluation
from depthfold.support import text as wording

MINUS = "\N{MINUS SIGN}"
NARROW_SPACE = "\N{NARROW NO-BREAK SPACE}"
SPACE = "\N{NO-BREAK SPACE}"
TIMES = "\N{MULTIPLICATION SIGN}"
NOT_MEASURED = "not measured"


def number(value: float, digits: int = 4) -> str:
    """Return the value with `digits` significant digits, without an exponent between 1e-5 and 1e9."""
    text = f"{value:.{digits}g}"
    if "e" in text and 1e-5 <= abs(value) < 1e9:
        text = f"{value:,.0f}" if abs(value) >= 1 else f"{value:.{digits + 4}f}".rstrip("0")
    return text.replace("-", MINUS)


def ms(value: float) -> str:
    """Return milliseconds with four digits, including trailing zeros, so that columns line up (17.60 and 17.91)."""
    text = f"{value:#.4g}".rstrip(".").replace("-", MINUS)
    return f"{number(value) if 'e' in text else text}{NARROW_SPACE}ms"


def entry_time(value: float, floored: bool) -> str:
    """Return the time of an entry of the latency table, marked if it is the least cost that the calibration counts."""
    return f"{ms(value)} (floor)" if floored else ms(value)


def percent(share: float) -> str:
    return f"{100 * share:.1f}{NARROW_SPACE}%".replace("-", MINUS)


def relative_change(before: float | None, after: float | None) -> str:
    """Return the change from `before` to `after` in per cent, or an empty text if it is not known."""
    if not before or after is None:
        return ""
    return f"{100 * (after / before - 1):+.1f}{NARROW_SPACE}%".replace("-", MINUS)


def factor(value: float) -> str:
    return f"{value:.2f}{TIMES}"


def faster(before: float | None, after: float | None) -> str:
    """Return the speed-up from `before` to `after`, or an empty text if it is not known."""
    return f"{factor(before / after)}{SPACE}as{SPACE}fast" if before and after else ""


def amount(count: float) -> str:
    return wording.amount(count).replace(" ", NARROW_SPACE)


def memory(profile: Profile) -> str:
    """Return the peak memory in megabytes, or the reason why it was not measured."""
    if profile.memory is not None:
        return f"{number(profile.memory / 1e6)}{NARROW_SPACE}MB"
    return f"{NOT_MEASURED}: {profile.memory_reason}" if profile.memory_reason else NOT_MEASURED


def score(evaluation: Evaluation) -> str:
    return f"{100 * evaluation.score:.2f}{NARROW_SPACE}%" if evaluation.share else number(evaluation.score)


def score_with_error(evaluation: Evaluation) -> str:
    """Return the score, with its uncertainty in brackets if it is known."""
    unit, scale = (f"{SPACE}points", 100) if evaluation.share else ("", 1)
    images = None if evaluation.images is None else f"{evaluation.images:,}{SPACE}images"
    if evaluation.spread is not None:
        known = [f"±{SPACE}{number(scale * evaluation.spread, 2)}{unit} over training runs", images]
    elif evaluation.standard_error is not None:
        known = [f"±{SPACE}{number(scale * evaluation.standard_error, 2)}{unit} standard error", images]
    else:
        known = [images]
    uncertainty = ", ".join(text for text in known if text)
    return f"{score(evaluation)} ({uncertainty})" if uncertainty else score(evaluation)


def score_change(before: Evaluation, after: Evaluation) -> str:
    """Return the difference of two scores, in points if they are shares."""
    difference = after.score - before.score
    text = f"{100 * difference:+.2f}{SPACE}points" if before.share else f"{difference:+.4g}"
    return text.replace("-", MINUS)


def shape(convolution: ConvShape) -> str:
    """Return the convolution as text, with typographic signs instead of ASCII."""
    return re.sub(r"(?<=\d)x(?=\d)", TIMES, str(convolution)).replace("->", "\N{RIGHTWARDS ARROW}")


def layers(span: Span, network: Network) -> str:
    """Return the numbers and names of the layers of a span."""
    first, last = span.layers[0], span.layers[-1]
    names = [network.layers[l - 1].where for l in (first, last)]
    return f"layer {first} ({names[0]})" if first == last else f"layers {first} to {last} ({names[0]} to {names[1]})"


def unbroken(text: str) -> str:
    """Return the text with a minus sign in its exponents: a line may break after the hyphen of 2e-06."""
    return re.sub(r"(?<=\de)-(?=\d)", MINUS, text)


def pieces(name: str) -> list[str]:
    """Return a name in pieces between which a line may break: after punctuation, as in torchvision:mobilenet_v2."""
    return re.findall(r"[^:/_.,=]*[:/_.,=]+|[^:/_.,=]+", name)


def field_value(value: object) -> str:
    """Return a field of an environment as text."""
    if value is None:
        return "not stated"
    return TIMES.join(map(str, value)) if isinstance(value, tuple) else str(value)


def join_and(items: Iterable[str], most: int | None = None) -> str:
    """Return the items as a list in a sentence ("one, two and three"), the first `most` of them if there are more."""
    every = list(items)
    if most is not None and len(every) > most:
        return wording.listed(every, most)
    *first, last = every
    return f"{', '.join(first)} and {last}" if first else last


FILTERS = {
    "amount": amount,
    "entry_time": entry_time,
    "factor": factor,
    "field_value": field_value,
    "join_and": join_and,
    "layers": layers,
    "memory": memory,
    "ms": ms,
    "number": number,
    "percent": percent,
    "pieces": pieces,
    "plural": wording.count,
    "repr": repr,
    "score": score,
    "score_with_error": score_with_error,
    "shape": shape,
    "unbroken": unbroken,
}
FUNCTIONS = {"faster": faster, "relative_change": relative_change, "score_change": score_change}
