"""What plans maximise: sums of importances, normalised (Appendix B.3) or predicted by a surrogate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean

import numpy as np

from depthfold.core import Drops, FlaggedSpan, ImportanceTable, Surrogate
from depthfold.errors import InvalidValue, TableError
from depthfold.stage_one import Floats
from depthfold.support.coerce import as_float

# A larger importance stands for "never" and was not measured. It would decide the mean that alpha subtracts.
LARGEST = 1e12


def objective(
    importance: ImportanceTable, alpha: float | None, surrogate: Surrogate | None = None
) -> tuple[dict[tuple[FlaggedSpan, Drops], float], float]:
    """Return what each block, with what it drops, adds to the sum that a plan maximises, and the part for any block.

    With `alpha`, this is I[i, j, a, b] - alpha * mean, with the mean over all entries of a single layer. Short training
    underestimates the importance of every block a little, so plans with many blocks look worse than they are; the
    normalisation compensates for this. With a surrogate, it is what the block adds to the predicted score of a plan.
    """
    values = dict(importance.options)
    _check_sizes(values)
    slope, per_block = 1.0, 0.0
    if alpha is not None:
        per_block = -_shift(importance.importances, alpha)
    if surrogate is not None:
        slope, per_block = surrogate.slope, surrogate.per_block
    return {key: slope * value + per_block for key, value in values.items()}, per_block


def importance_array(values: Mapping[tuple[FlaggedSpan, Drops], float], L: int) -> Floats:
    """Return I[i, j, a, b] for blocks that drop nothing, -inf if there is no such block.

    The flags a and b are 1 if there is an activation at i and at j.
    """
    I = np.full((L + 1, L + 1, 2, 2), -np.inf)
    for (block, dropped), value in values.items():
        if not dropped:
            I[block.i, block.j, int(block.a), int(block.b)] = value
    return I


def _shift(importances: Mapping[FlaggedSpan, float], alpha: float) -> float:
    """Return alpha times the mean. Entries that drop layers do not count, but are shifted like the others."""
    single = [value for block, value in importances.items() if len(block.span) == 1]
    if not single:
        raise TableError(
            "alpha needs the mean of the entries of a single layer, and the importance table has no score of one. "
            "Measure them, or leave out alpha."
        )
    if not (shift := checked_alpha(alpha) * fmean(single)) or abs(shift) <= LARGEST:
        return shift
    raise InvalidValue(
        f"alpha must not shift importances by more than {LARGEST:g}, found {alpha!r}. The paper uses 1.2 to 1.8."
    )


def checked_alpha(alpha: object) -> float:
    """Return alpha as a float. Raise InvalidValue if it is not a finite number of at least 0.

    Trainings underestimate every block, and alpha corrects for this. A negative one would add to the error.
    """
    expected = "a finite number of at least 0"
    value = as_float("alpha", alpha, InvalidValue, expected)
    if not 0 <= value < math.inf:
        raise InvalidValue(f"alpha must be {expected}, found {alpha!r}. The paper uses 1.2 to 1.8.")
    return value


def _check_sizes(options: Mapping[tuple[FlaggedSpan, Drops], float]) -> None:
    for (span, _), value in options.items():
        if abs(value) > LARGEST:
            raise TableError(
                f"The importance of {span} is {value:g}, expected at most {LARGEST:g} in size. If the block must not "
                "be used, give a reason instead of a value."
            )
