"""What plans maximise: sums of importances, normalised (Appendix B.3) or predicted by a surrogate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean
from typing import Literal, get_args

import numpy as np

from depthfold.core import Drops, FlaggedSpan, ImportanceTable, Position, Surrogate
from depthfold.errors import InvalidValue, TableError
from depthfold.stage_one import Floats
from depthfold.support.coerce import as_float

# A larger importance stands for "never" and was not measured. It would decide the mean that alpha subtracts.
LARGEST = 1e12

# The entries whose mean is subtracted: all those of a single layer (the paper's choice), those of a single layer with
# the network's own activations, or all entries.
Normalisation = Literal["single", "default", "all"]


def objective(
    importance: ImportanceTable, alpha: float | None, over: Normalisation = "single", surrogate: Surrogate | None = None
) -> dict[tuple[FlaggedSpan, Drops], float]:
    """Return what each block, with what it drops, adds to the sum that a plan maximises.

    With `alpha`, this is I[i, j, a, b] - alpha * mean, with the mean over the entries that `over` names. Short training
    underestimates the importance of every block a little, so plans with many blocks look worse than they are; the
    normalisation compensates for this. With a surrogate, it is what the block adds to the predicted score of a plan.
    """
    values = dict(importance.options)
    _check_sizes(values)
    if alpha is not None:
        shift = _shift(importance.importances, alpha, over)
        values = {key: value - shift for key, value in values.items()}
    if surrogate is not None:
        slope, per_block = surrogate.slope, surrogate.per_block
        values = {key: slope * value + per_block for key, value in values.items()}
    return values


def importance_array(values: Mapping[tuple[FlaggedSpan, Drops], float], L: int) -> Floats:
    """Return I[i, j, a, b] for blocks that drop nothing, -inf if there is no such block.

    The flags a and b are 1 if there is an activation at i and at j.
    """
    I = np.full((L + 1, L + 1, 2, 2), -np.inf)
    for (block, dropped), value in values.items():
        if not dropped:
            I[block.i, block.j, int(block.a), int(block.b)] = value
    return I


def _shift(importances: Mapping[FlaggedSpan, float], alpha: float, over: Normalisation) -> float:
    """Return alpha times the mean. Entries that drop layers do not count, but are shifted like the others."""
    if over not in get_args(Normalisation):
        known = ", ".join(map(repr, get_args(Normalisation)))
        raise InvalidValue(f"There is no normalisation {over!r}. Use one of {known}.")
    alpha = checked_alpha(alpha)
    bare = _without_activation(importances)
    chosen = [value for span, value in importances.items() if _counts(span, over, bare)]
    if not chosen:
        raise TableError(_nothing_to_average(over))
    return alpha * fmean(chosen)


def checked_alpha(alpha: object) -> float:
    """Return alpha as a float. Raise InvalidValue if it is not a finite number."""
    value = as_float("alpha", alpha, InvalidValue, "a finite number")
    if not math.isfinite(value):
        raise InvalidValue(f"alpha must be a finite number, found {alpha!r}. The paper uses 1.2 to 1.8.")
    return value


def _check_sizes(options: Mapping[tuple[FlaggedSpan, Drops], float]) -> None:
    for (span, _), value in options.items():
        if abs(value) > LARGEST:
            raise TableError(
                f"The importance of {span} is {value:g}, expected at most {LARGEST:g} in size. If the block must not "
                "be used, give a reason instead of a value."
            )


def _nothing_to_average(over: Normalisation) -> str:
    if over == "all":
        return "The importance table has no entry with a score, so it has no mean. Measure its entries."
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


def _without_activation(importances: Mapping[FlaggedSpan, float]) -> frozenset[Position]:
    """Return the positions where the network has no activation: those where some entry has the flag 0."""
    starts = {span.i for span in importances if not span.a}
    return frozenset(starts | {span.j for span in importances if not span.b})
