"""Warnings about an importance table: failed measurements, and a hold-out set that is too small."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Sequence
from statistics import fmean, median, pstdev

from depthfold.core import BlockOption, ImportanceTable, Score
from depthfold.errors import TableError
from depthfold.importance.entry import Comparison
from depthfold.stage_one import LEFT_OUT
from depthfold.support.text import count
from depthfold.tasks import ClassificationTask
from depthfold.training import Task

FACTOR = 2.0  # the spread of the scores must be at least this many standard errors of one score


class IncompleteTable(UserWarning):
    """Some measurements failed. A block without a score has a reason, and no plan uses it."""


class SmallHoldout(UserWarning):
    """The hold-out set is too small to tell the scores of blocks apart."""


def warn_if_incomplete(table: ImportanceTable, seeds: int, left_out: Collection[BlockOption]) -> None:
    """Give an IncompleteTable warning if blocks have no score that could save time. Raise TableError if all failed."""
    without = [entry for entry in table.entries if entry.reason is not None and entry.reason not in LEFT_OUT]
    failed = [entry for entry in without if (entry.span, entry.dropped) not in left_out]
    partly = [entry for entry in table.entries if 0 < len(entry.samples) < seeds]
    if failed and not table.options:
        raise TableError(
            f"Every measurement failed. The first failure: {failed[0].name}: {str(failed[0].reason).rstrip('.')}. "
            "Correct this, and run again with retry=True (--retry)."
        )
    lines = _listed(failed, len(table.entries), "could not be measured; no plan will use them")
    if partly:
        lines += [f"{count(len(partly), 'block')} of {len(table.entries)} could not be measured with every seed:"]
        lines += [f"  {entry.name}: {len(entry.samples)} of {seeds} measurements" for entry in partly]
    if lines:
        lines += ["To run only these again, use retry=True with the same run=..., or --retry on the command line."]
    refused = [entry for entry in without if (entry.span, entry.dropped) in left_out]
    lines += _listed(refused, len(table.entries), "are too large for this method; no plan will use them")
    if lines:
        warnings.warn("\n".join(lines), IncompleteTable, stacklevel=3)


def _listed(entries: Collection[Score], total: int, what: str) -> list[str]:
    if not entries:
        return []
    return [f"{count(len(entries), 'block')} of {total} {what}:", *(f"  {e.name}: {e.reason}" for e in entries)]


def warn_about_holdout(table: ImportanceTable, task: Task, comparisons: Sequence[Comparison]) -> None:
    """Give a SmallHoldout warning if the scores of blocks of several layers differ by little more than chance.

    `comparisons` have the standard errors of these scores if they compare outputs. Otherwise they follow from the
    accuracies of a ClassificationTask; those of other scores are not known.
    """
    scores = [entry.mean for entry in table.entries if entry.samples and len(entry.span.span) > 1]
    if len(scores) < 2:
        return
    classifies = isinstance(task, ClassificationTask)
    if comparisons:
        number, error = comparisons[0]["inputs"], median(one["error"] for one in comparisons)
        what, unit = "scores", ""
    elif isinstance(task, ClassificationTask):
        number = task.count("holdout")
        error = _error_of_accuracy(fmean(scores), number)
        what, unit = "accuracies", " points"
    else:
        return
    spread = pstdev(scores)
    if spread >= FACTOR * error:
        return
    advice, images = "Use a larger hold-out set.", "image" if classifies else "input"
    if needed := _needed(number, spread, error):
        advice = f"It would take about {count(needed, images)}{' (holdout=...)' if classifies else ''}."
    warnings.warn(
        f"The hold-out set of {count(number, images)} is too small to tell blocks apart: their {what} have a standard "
        f"deviation of {spread:.2g}{unit}, and each has a standard error of {error:.2g}{unit}. {advice}",
        SmallHoldout,
        stacklevel=3,
    )


def _needed(number: int, spread: float, error: float) -> int | None:
    """Return how many inputs it takes until the spread is FACTOR standard errors; None if there is no estimate.

    The variance of the scores is that of the true scores plus that of the error. Only the latter falls with the inputs.
    """
    true = spread**2 - error**2
    return math.ceil(number * (FACTOR**2 - 1) * error**2 / true) if true > 0 else None


def _error_of_accuracy(accuracy: float, images: int) -> float:
    # One more right and one more wrong answer, so that an accuracy of 100% also has an error.
    share = (accuracy / 100 * images + 1) / (images + 2)
    return 100 * math.sqrt(share * (1 - share) / images)
