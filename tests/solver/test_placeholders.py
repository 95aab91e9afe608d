"""Entries of absurd size, such as -1e18 for "never": they are refused by name."""

from __future__ import annotations

import pytest

from depthfold.core import FlaggedSpan, ImportanceTable, LatencyTable, Score, Span, Timing
from depthfold.core.latency_table import LONGEST
from depthfold.errors import InvalidValue, TableError
from depthfold.solver import solve
from structures import mobilenet_v2
from tables import importance_table, latency_table, plausible_tables, timing


def tables(key: tuple[int, int, int, int] = (47, 50, 1, 1), value: float | None = None) -> tuple:
    """MobileNetV2's structure, with one importance replaced."""
    network = mobilenet_v2()
    latency, importance = plausible_tables(network.spans(), network.flagged_spans(), 5)
    values = {(f.i, f.j, f.a, f.b): v for f, v in importance.importances.items()}
    assert key in values
    return latency, importance_table(values if value is None else values | {key: value})


@pytest.mark.parametrize("value", [-1e18, -1e15, 1e13, 1e100])
@pytest.mark.parametrize("alpha", [None, 1.6])
def test_placeholder_is_refused_by_name(value: float, alpha: float | None) -> None:
    message = (
        r"The importance of \(47, 50\], flags 11 is .*, expected at most 1e\+12 in size\. .* give a reason "
        "instead of a value"
    )
    with pytest.raises(TableError, match=message):
        solve(*tables(value=value), alpha=alpha)


def test_placeholder_of_a_single_layer_is_refused_before_normalisation() -> None:
    """Its mean would shift all entries by as much, so that they look comparable to it."""
    with pytest.raises(TableError, match=r"The importance of \(0, 1\], flags 11 is -1e\+18"):
        solve(*tables((0, 1, 1, 1), -1e18), alpha=1.6)


@pytest.mark.parametrize("value", [-1.0, -100.0, -1000.0, -1e9])
def test_value_that_a_metric_can_have_is_accepted_and_loses_no_plan(value: float) -> None:
    latency, importance = tables((47, 50, 1, 1), value)
    without = [entry for entry in importance.entries if entry.span != FlaggedSpan(47, 50, True, True)]
    reason = Score(span=FlaggedSpan(47, 50, True, True), reason="out of the question")
    assert solve(latency, importance).points == solve(latency, ImportanceTable(entries=(*without, reason))).points


def test_one_harmful_block_among_harmless_ones_is_accepted() -> None:
    """As in a table scored by divergence: layers that stay cost nothing, harmless activations about 1e-7, one 0.5."""
    times = {(0, 1): 1.0, (1, 2): 1.0, (2, 3): 1.0, (0, 2): 1.5, (1, 3): 1.5, (0, 3): 1.8}
    values = {(0, 1): 0.0, (1, 2): 0.0, (2, 3): 0.0, (0, 2): -1e-7, (1, 3): -1.1e-7, (0, 3): -0.5}
    frontier = solve(latency_table(times), importance_table({(*ends, 1, 1): v for ends, v in values.items()}))
    assert [(p.latency, p.importance) for p in frontier.points] == [(1.8, -0.5), (2.5, -1e-7), (3.0, 0.0)]


def test_alpha_that_shifts_importances_out_of_range_is_refused() -> None:
    latency, importance = tables()
    for alpha in (1e18, 1e308):
        with pytest.raises(InvalidValue, match=r"^alpha must not shift importances by more than 1e\+12, found 1e\+"):
            solve(latency, importance, alpha=alpha)


def test_base_score_on_another_scale_is_accepted() -> None:
    latency, importance = tables()
    assert solve(latency, ImportanceTable(entries=importance.entries, base=75.0)).points[-1].importance < -74


@pytest.mark.parametrize("huge", [1e308, -1e308, 10**400])
def test_scores_near_the_largest_float_are_refused(huge: float) -> None:
    span = FlaggedSpan(0, 1, True, True)
    with pytest.raises(TableError, match=r"A score of \(0, 1\], flags 11 is .*; expected a finite number, 1e\+100"):
        Score(span=span, samples=(huge, huge))
    with pytest.raises(TableError, match=r"The base score of the importance table is .*; expected a finite number"):
        ImportanceTable(base=huge, entries=(Score(span=span, samples=(0.5,)),))


@pytest.mark.parametrize("huge", [1e30, 1e308, 1.1e6])
def test_placeholder_for_a_time_is_refused(huge: float) -> None:
    message = r"of \(0, 1\] is .* ms; expected milliseconds from 0 to 1e\+06\. .* give the reason instead"
    with pytest.raises(TableError, match=message):
        timing(0, 1, huge)
    with pytest.raises(TableError, match=message):
        Timing.measured(Span(0, 1), [huge, huge])


def test_longest_time_loses_no_plan() -> None:
    latency, importance = tables()
    slow = [timing(47, 50, LONGEST) if e.span == Span(47, 50) else e for e in latency.entries]
    none = [Timing(span=e.span, reason="too slow") if e.span == Span(47, 50) else e for e in latency.entries]
    fast = [point for point in solve(LatencyTable(entries=slow), importance).points if point.latency < LONGEST]
    assert tuple(fast) == solve(LatencyTable(entries=none), importance).points


def test_sums_of_the_longest_times_do_not_overflow() -> None:
    times = {(l - 1, l): LONGEST for l in range(1, 255)}
    frontier = solve(latency_table(times), importance_table({(*ends, 1, 1): 1.0 for ends in times}))
    assert [point.latency for point in frontier.points] == [254 * LONGEST]


def test_tables_of_zeros_are_solved() -> None:
    latency, _ = tables()
    assert len(solve(latency, importance_table({(s.i, s.j, 1, 1): 0.0 for s in latency.times}))) == 1
