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


def normalised(table: dict[FlaggedSpan, float], alpha: float, over: str = "single") -> dict[FlaggedSpan, float]:
    entries = tuple(Score(span=span, samples=(value,)) for span, value in table.items())
    found = objective(ImportanceTable(entries=entries), alpha, over)
    assert all(dropped == NOTHING for _, dropped in found)
    return {span: value for (span, _), value in found.items()}


# The network has an activation at position 1 and none at position 2.
TABLE = {F(0, 1, 1, 1): -1.0, F(1, 2, 1, 0): -2.0, F(1, 2, 1, 1): -6.0, F(0, 2, 1, 1): -7.0}


@pytest.mark.parametrize(("over", "mean"), [("single", -3.0), ("default", -1.5), ("all", -4.0)])
def test_subtracts_alpha_times_the_mean(over: str, mean: float) -> None:
    assert normalised(TABLE, 1.6, over) == {span: value - 1.6 * mean for span, value in TABLE.items()}


def test_counts_the_entries_that_the_paper_counts() -> None:
    """83 entries of a single layer in MobileNetV2, 50 of them with the network's own activations."""
    network = mobilenet_v2()
    blocks = network.flagged_spans()
    for over, count in (("single", 83), ("default", 50), ("all", 315)):
        marked = dict.fromkeys(blocks, 1.0)
        own = network.activations | {0}
        singles = [f for f in blocks if f.j == f.i + 1]
        chosen = {"all": list(blocks), "single": singles}.get(
            over, [f for f in singles if (f.a, f.b) == (f.i in own, f.j in own)]
        )
        assert len(chosen) == count
        for block in chosen:
            marked[block] = 3.0
        assert normalised(marked, 1.0, over)[blocks[0]] == pytest.approx(marked[blocks[0]] - 3.0, abs=1e-15)


def test_solve_normalises_when_alpha_is_given() -> None:
    network = mobilenet_v2()
    latency, importance = plausible_tables(network.spans(), network.flagged_spans(), 0)
    raw, shifted = solve(latency, importance), solve(latency, importance, alpha=1.6, normalisation="single")
    assert (raw.alpha, raw.normalisation, shifted.alpha, shifted.normalisation) == (None, None, 1.6, "single")
    singles = [value for span, value in importance.importances.items() if span.j == span.i + 1]
    values = importance.importances
    for plan in shifted:
        ends, A = (0, *plan.boundaries, 50), plan.plan.activations
        blocks = [F(i, j, i == 0 or i in A, j in A) for i, j in pairwise(ends)]
        assert plan.importance == pytest.approx(sum(values[f] - 1.6 * fmean(singles) for f in blocks), abs=1e-12)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(InvalidValue, match=r"There is no normalisation 'some'\. Use one of 'single', 'default', 'all'"):
        normalised(TABLE, 1.0, "some")
    with pytest.raises(InvalidValue, match="alpha must be a finite number, found nan"):
        normalised(TABLE, math.nan)
    with pytest.raises(TableError, match="needs entries of a single layer, and the importance table has none"):
        normalised({F(0, 2, 1, 1): 1.0}, 1.0)


def test_messages_name_a_normalisation_that_works() -> None:
    with pytest.raises(TableError, match=r"no entry with a score, so it has no mean. Measure its entries\."):
        objective(ImportanceTable(entries=(Score(span=F(0, 1, 1, 1), reason="failed"),)), 1.0, "all")
    with pytest.raises(TableError, match=r"needs entries of a single layer, .* or normalise over 'all'\."):
        normalised({F(0, 2, 1, 1): 1.0}, 1.0, "single")
    with pytest.raises(TableError, match=r"with the network's own activations, .* or normalise over 'single' or 'all'"):
        normalised({F(1, 2, 1, 1): 1.0, F(1, 3, 0, 1): 1.0}, 1.0, "default")
