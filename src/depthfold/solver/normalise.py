"""Normalisation of the importances (Appendix B.3).

A short training scores every block lower than the definition of its importance, once for every block, so plans of
many blocks look worse than they are. Subtracting alpha times a mean importance from every entry evens that out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean
from typing import Literal, get_args

from depthfold.core import FlaggedSpan, Position
from depthfold.errors import InvalidValue, TableError
from depthfold.support.coerce import as_float

# Which entries the mean is taken over: all those of a single layer (the paper's choice), those of a single layer
# whose flags are the network's own, or all entries.
Normalisation = Literal["single", "default", "all"]


def normalised(
    importances: Mapping[FlaggedSpan, float], alpha: float, over: Normalisation = "single"
) -> dict[FlaggedSpan, float]:
    """I[i, j, a, b] - alpha * mean, with the mean over the entries that `over` names."""
    if over not in get_args(Normalisation):
        known = ", ".join(map(repr, get_args(Normalisation)))
        raise InvalidValue(f"There is no normalisation {over!r}; there are {known}.")
    alpha = checked_alpha(alpha)
    bare = _bare(importances)
    chosen = [value for span, value in importances.items() if _counts(span, over, bare)]
    if not chosen:
        raise TableError(_nothing_to_average(over))
    shift = alpha * fmean(chosen)
    if not math.isfinite(shift):
        raise InvalidValue(f"alpha = {alpha!r} times the mean importance is no number. The paper uses 1.2 to 1.8.")
    return {span: value - shift for span, value in importances.items()}


def checked_alpha(alpha: object) -> float:
    value = as_float("alpha", alpha, InvalidValue, "a finite number")
    if not math.isfinite(value):
        raise InvalidValue(f"alpha must be a finite number, found {alpha!r}. The paper uses 1.2 to 1.8.")
    return value


def _nothing_to_average(over: Normalisation) -> str:
    if over == "all":
        return "The importance table has no entry with a score, so there is no mean: measure its entries."
    own = " with the network's own activations" if over == "default" else ""
    others = "'single' or 'all'" if own else "'all'"
    return (
        f"The normalisation {over!r} needs entries of a single layer{own}, and the importance table has none. "
        f"Measure them, or normalise over {others}."
    )


def _counts(span: FlaggedSpan, over: Normalisation, bare: frozenset[Position]) -> bool:
    if over == "all":
        return True
    own = (span.i not in bare, span.j not in bare)
    return span.j == span.i + 1 and (over == "single" or (span.a, span.b) == own)


def _bare(importances: Mapping[FlaggedSpan, float]) -> frozenset[Position]:
    """Where the network has no activation of its own: exactly there entries have the flag 0."""
    starts = {span.i for span in importances if not span.a}
    return frozenset(starts | {span.j for span in importances if not span.b})
