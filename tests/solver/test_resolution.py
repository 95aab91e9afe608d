"""Entries of absurd size: they would set the lattice, and nothing else could be told apart on it."""

from __future__ import annotations

import pytest

from depthfold.core import FlaggedSpan, ImportanceTable, LatencyTable, Score, Span, Timing
from depthfold.errors import InvalidValue, TableError
from depthfold.solver import normalised, solve
from structures import mobilenet_v2
from tables import importance_table, plausible_tables


def tables(key: tuple[int, int, int, int] = (47, 50, 1, 1), value: float | None = None) -> tuple:
    """MobileNetV2's structure, with one importance replaced."""
    network = mobilenet_v2()
    latency, importance = plausible_tables(network.spans(), network.flagged_spans(), 5)
    values = {(f.i, f.j, f.a, f.b): v for f, v in importance.importances.items()}
    assert key in values
    return latency, importance_table(values if value is None else values | {key: value})


@pytest.mark.parametrize("value", [-1e18, -1e9, 1e7, 1e100])
@pytest.mark.parametrize("alpha", [None, 1.6])
def test_a_placeholder_is_refused_by_name(value: float, alpha: float | None) -> None:
    message = (
        r"The importance of \(47, 50\], flags 11 is .*, while the entries are 0\.0\d* in the median: .* has a reason "
        "instead of a value"
    )
    with pytest.raises(TableError, match=message):
        solve(*tables(value=value), alpha=alpha)


def test_a_placeholder_at_a_single_layer_does_not_hide_behind_the_mean() -> None:
    """Its mean would shift all entries by as much, so that they look comparable to it."""
    with pytest.raises(TableError, match=r"The importance of \(0, 1\], flags 11 is -1e\+18"):
        solve(*tables((0, 1, 1, 1), -1e18), alpha=1.6)


@pytest.mark.parametrize("value", [-1.0, -100.0, -1000.0])
def test_what_a_metric_can_yield_is_taken_and_loses_no_plan(value: float) -> None:
    latency, importance = tables((47, 50, 1, 1), value)
    without = [entry for entry in importance.entries if entry.span != FlaggedSpan(47, 50, True, True)]
    reason = Score(span=FlaggedSpan(47, 50, True, True), reason="out of the question")
    assert solve(latency, importance).points == solve(latency, ImportanceTable(entries=(*without, reason))).points


def test_an_alpha_that_swallows_the_entries() -> None:
    with pytest.raises(TableError, match=r"With alpha = 1e\+18 the normalisation shifts the importances so far"):
        solve(*tables(), alpha=1e18)
    with pytest.raises(InvalidValue, match=r"alpha = 1e\+308 times the mean importance is no number"):
        normalised({FlaggedSpan(0, 1, True, True): 1e100}, 1e308)


def test_a_base_score_that_swallows_the_scores() -> None:
    latency, importance = tables()
    for base in (-1e18, 1e99):
        with pytest.raises(TableError, match=r"The base score of the importance table is .*, but its scores are 0.0"):
            solve(latency, ImportanceTable(entries=importance.entries, base=base))
    assert solve(latency, ImportanceTable(entries=importance.entries, base=75.0)).exact


@pytest.mark.parametrize("huge", [1e308, -1e308, 10**400])
def test_numbers_at_the_end_of_the_floats(huge: float) -> None:
    span = FlaggedSpan(0, 1, True, True)
    with pytest.raises(TableError, match=r"A score of \(0, 1\], flags 11 is .*; expected a finite number, 1e\+100"):
        Score(span=span, samples=(huge, huge))
    with pytest.raises(TableError, match=r"The base score of the importance table is .*; expected a finite number"):
        ImportanceTable(base=huge, entries=(Score(span=span, samples=(0.5,)),))


@pytest.mark.parametrize("huge", [1e30, 1e308, 1.1e9])
def test_a_placeholder_for_a_time(huge: float) -> None:
    message = r"of \(0, 1\] is .* ms; expected at most 1e\+09 ms .* has a reason instead of a time"
    with pytest.raises(TableError, match=message):
        Timing(span=Span(0, 1), time=huge)
    with pytest.raises(TableError, match=message):
        Timing.measured(Span(0, 1), [huge, huge])


def test_the_longest_time_loses_no_plan() -> None:
    latency, importance = tables()
    slow = [Timing(span=e.span, time=1e9) if e.span == Span(47, 50) else e for e in latency.entries]
    none = [Timing(span=e.span, reason="too slow") if e.span == Span(47, 50) else e for e in latency.entries]
    fast = [point for point in solve(LatencyTable(entries=slow), importance).points if point.latency < 1e9]
    assert tuple(fast) == solve(LatencyTable(entries=none), importance).points


def test_tables_of_zeros_are_tables() -> None:
    latency, _ = tables()
    assert len(solve(latency, importance_table({(s.i, s.j, 1, 1): 0.0 for s in latency.times}))) == 1
