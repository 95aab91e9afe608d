from __future__ import annotations

import math
from itertools import pairwise
from statistics import fmean

import pytest

from depthfold.core import NOTHING, FlaggedSpan, ImportanceTable, Score
from depthfold.errors import InvalidValue, TableError
from depthfold.solver import objective, solve
from structures import mobilenet_v2
from tables import plausible_tables


def F(i: int, j: int, a: int, b: int) -> FlaggedSpan:
    return FlaggedSpan(i, j, bool(a), bool(b))


def normalised(table: dict[FlaggedSpan, float], alpha: float) -> dict[FlaggedSpan, float]:
    entries = tuple(Score(span=span, samples=(value,)) for span, value in table.items())
    found, per_block = objective(ImportanceTable(entries=entries), alpha)
    assert per_block == pytest.approx(found[next(iter(table)), NOTHING] - next(iter(table.values())))
    assert all(dropped == NOTHING for _, dropped in found)
    return {span: value for (span, _), value in found.items()}


# The network has an activation at position 1 and none at position 2.
TABLE = {F(0, 1, 1, 1): -1.0, F(1, 2, 1, 0): -2.0, F(1, 2, 1, 1): -6.0, F(0, 2, 1, 1): -7.0}


def test_subtracts_alpha_times_the_mean() -> None:
    assert normalised(TABLE, 1.6) == {span: value + 1.6 * 3.0 for span, value in TABLE.items()}


def test_counts_the_entries_that_the_paper_counts() -> None:
    """83 entries of a single layer in MobileNetV2."""
    blocks = mobilenet_v2().flagged_spans()
    single = [block for block in blocks if block.j == block.i + 1]
    assert (len(single), len(blocks)) == (83, 315)
    marked = dict.fromkeys(blocks, 1.0) | dict.fromkeys(single, 3.0)
    assert normalised(marked, 1.0)[blocks[0]] == pytest.approx(marked[blocks[0]] - 3.0, abs=1e-15)


def test_solve_normalises_when_alpha_is_given() -> None:
    network = mobilenet_v2()
    latency, importance = plausible_tables(network.spans(), network.flagged_spans(), 0)
    raw, shifted = solve(latency, importance), solve(latency, importance, alpha=1.6)
    assert (raw.alpha, shifted.alpha) == (None, 1.6)
    singles = [value for span, value in importance.importances.items() if span.j == span.i + 1]
    values = importance.importances
    for plan in shifted:
        ends, A = (0, *plan.boundaries, 50), plan.plan.activations
        blocks = [F(i, j, i == 0 or i in A, j in A) for i, j in pairwise(ends)]
        assert plan.importance == pytest.approx(sum(values[f] - 1.6 * fmean(singles) for f in blocks), abs=1e-12)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(InvalidValue, match="alpha must be a finite number of at least 0, found nan"):
        normalised(TABLE, math.nan)
    with pytest.raises(TableError, match=r"the entries of a single layer, .* has no score of one\. Measure"):
        normalised({F(0, 2, 1, 1): 1.0}, 1.0)
