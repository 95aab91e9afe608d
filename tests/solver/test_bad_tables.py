"""Each mistake in the tables or arguments has its own message."""

from __future__ import annotations

import math

import numpy as np
import pytest

from depthfold.core import Environment, Frontier, ImportanceTable, LatencyTable, Score, Timing
from depthfold.core.span import FlaggedSpan, Span
from depthfold.errors import InvalidValue, TableError
from depthfold.solver import solve
from depthfold.solver.joint import Joint
from tables import importance_table, latency_table, timing

TIMES = {(0, 1): 1.0, (1, 2): 1.0, (0, 2): 1.5}
VALUES = {(0, 1, 1, 1): 0.0, (1, 2, 1, 1): 0.0, (0, 2, 1, 1): -1.0}


def latency(**fields: object) -> LatencyTable:
    return latency_table(TIMES, **fields)


def importance(**fields: object) -> ImportanceTable:
    return importance_table(VALUES, **fields)


@pytest.mark.parametrize(
    ("mine", "theirs", "message"),
    [
        ({"network": "a"}, {"network": "b"}, "of another network than the latency table: name 'b' against 'a'"),
        ({"fingerprint": "12"}, {"fingerprint": "34"}, "fingerprint '34' against '12'"),
    ],
)
def test_tables_of_two_networks_are_refused(mine: dict[str, str], theirs: dict[str, str], message: str) -> None:
    with pytest.raises(TableError, match=message):
        solve(latency(**mine), importance(**theirs))
    solve(latency(**mine), importance(**mine))
    solve(latency(**mine), importance())


def test_names_are_compared_only_without_fingerprints() -> None:
    assert solve(latency(network="a", fingerprint="12"), importance(network="b", fingerprint="12")).fingerprint == "12"
    with pytest.raises(TableError, match="name 'b' against 'a'"):
        solve(latency(network="a", fingerprint="12"), importance(network="b"))


def test_shorter_table_lacks_entries() -> None:
    message = (
        r"The importance table has no entry for \(0, 2\], \(1, 2\], which the latency table has \(the latency table "
        r"ends at position 2, the importance table at 1\)\. Measure it"
    )
    with pytest.raises(TableError, match=message):
        solve(latency(), importance_table({(0, 1, 1, 1): 0.0}))


def test_tables_of_two_environments_are_refused() -> None:
    gpu, cpu = Environment(device="GPU", batch=128), Environment(device="CPU", batch=128)
    with pytest.raises(TableError, match="of another environment than the latency table: device: GPU against CPU"):
        solve(latency(environment=gpu), importance(environment=cpu))
    assert solve(latency(environment=gpu), importance(environment=Environment(batch=128))).environment == gpu


def test_missing_entries_are_named() -> None:
    less = {key: value for key, value in VALUES.items() if key != (0, 2, 1, 1)}
    with pytest.raises(
        TableError, match=r"The importance table has no entry for \(0, 2\], which the latency table has"
    ):
        solve(latency(), importance_table(less))
    with pytest.raises(
        TableError, match=r"The latency table has no entry for \(0, 2\], which the importance table has"
    ):
        solve(latency_table({key: TIMES[key] for key in ((0, 1), (1, 2))}), importance())


def test_many_missing_entries_are_counted() -> None:
    times = {(i, j): 1.0 for i in range(5) for j in range(i + 1, 6) if i < j <= 5}
    values = {(i, i + 1, 1, 1): 0.0 for i in range(5)}
    with pytest.raises(TableError, match=r"no entry for \(0, 2\], \(0, 3\], .* and 5 more"):
        solve(latency_table(times), importance_table(values))


def test_spans_must_cover_the_network() -> None:
    times, values = {(0, 1): 1.0, (2, 3): 1.0}, {(0, 1, 1, 1): 0.0, (2, 3, 1, 1): 0.0}
    message = (
        "of the latency table do not cover the network: .* from position 0 to 3; the furthest position reached is 1"
    )
    with pytest.raises(TableError, match=message):
        solve(latency_table(times), importance_table(values))


@pytest.mark.parametrize("merge_along", ["S", "B"])
def test_blocks_must_cover_the_network(merge_along: str) -> None:
    scores = importance_table({(0, 1, 1, 1): 0.0, (1, 2, 0, 1): 0.0})  # after 1 the flags do not fit
    without = Score(span=FlaggedSpan(0, 2, True, True), reason="diverged")
    message = "of the importance table do not cover the network: .* the furthest position reached is 1"
    with pytest.raises(TableError, match=message):
        solve(latency(), ImportanceTable(entries=(*scores.entries, without)), merge_along=merge_along)


@pytest.mark.parametrize("table", ["latency", "importance"])
def test_table_that_does_not_cover_the_network_is_refused_before_stage_one(
    table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropped layers, stage one can take a minute."""
    monkeypatch.setattr(Joint, "__init__", None)
    spans = [(0, 1), (2, 3)] if table == "latency" else [(0, 1), (1, 2), (2, 3)]
    blocks = importance_table({(i, j, int(table == "latency" or i != 1), 1): 0.0 for i, j in spans})
    with pytest.raises(TableError, match=f"of the {table} table do not cover the network"):
        solve(latency_table(dict.fromkeys(spans, 1.0)), blocks, merge_along="B")


def test_flag_at_the_input_must_be_1() -> None:
    message = r"has \(0, 2\], flags 01, but the flag at position 0, the input of the network, is always 1. Enter 1"
    with pytest.raises(TableError, match=message):
        solve(latency(), importance_table({(0, 1, 1, 1): 0.0, (1, 2, 1, 1): 0.0, (0, 2, 0, 1): 0.0}))


def test_entry_with_a_reason_is_not_missing() -> None:
    entries = [entry for entry in latency().entries if entry.span != Span(0, 2)]
    untimed = LatencyTable(entries=(*entries, Timing(span=Span(0, 2), reason="out of memory")))
    assert solve(untimed, importance()).points[0].cuts == (1,)
    scores = [entry for entry in importance().entries if entry.span != FlaggedSpan(0, 1, True, True)]
    unscored = ImportanceTable(entries=(*scores, Score(span=FlaggedSpan(0, 1, True, True), reason="diverged")))
    assert [point.activations for point in solve(latency(), unscored).points] == [(2,)]


def test_tables_must_cover_the_network_together() -> None:
    """B must pass the activation at 1, and there is no time for a cut at 1."""
    times = LatencyTable(
        entries=(
            Timing(span=Span(0, 1), reason="out of memory"),
            timing(1, 2, 1.0),
            timing(0, 2, 1.0),
        )
    )
    scores = ImportanceTable(
        entries=(
            Score(span=FlaggedSpan(0, 1, True, True), samples=(0.0,)),
            Score(span=FlaggedSpan(1, 2, True, True), samples=(0.0,)),
            Score(span=FlaggedSpan(0, 2, True, True), reason="diverged"),
        )
    )
    with pytest.raises(TableError, match="No plan fits both tables"):
        solve(times, scores)


@pytest.mark.parametrize("merge_along", ["S", "B"])
def test_blocks_whose_flags_do_not_match_do_not_cover_the_network(merge_along: str) -> None:
    """Both spans have a time, so the latency table is not to blame."""
    blocks = importance_table({(0, 1, 1, 0): 0.0, (1, 2, 1, 1): 0.0})
    message = "of the importance table do not cover the network: no chain of blocks with matching flags"
    with pytest.raises(TableError, match=message):
        solve(latency_table({(0, 1): 1.0, (1, 2): 1.0}), blocks, merge_along=merge_along)


@pytest.mark.parametrize("start", [1, 2])
def test_mistyped_end_is_refused_before_it_takes_memory(start: int) -> None:
    """An array of all pairs of positions would take 600 GiB."""
    spans = [(0, 1), (1, 2), (start, 200_000)]
    blocks = importance_table({(i, j, 1, 1): 0.0 for i, j in spans})
    message = rf"^The latency table has \({start}, 200000\], which merges {200_000 - start} layers; .* Correct its end"
    with pytest.raises(TableError, match=message):
        solve(latency_table(dict.fromkeys(spans, 1.0)), blocks)


def test_mistyped_start_and_end_are_refused_before_they_take_memory() -> None:
    spans = [(0, 1), (1, 2), (199_999, 200_000)]
    blocks = importance_table({(i, j, 1, 1): 0.0 for i, j in spans})
    with pytest.raises(TableError, match=r"no chain of them leads from position 0 to 200000; the furthest .* is 2"):
        solve(latency_table(dict.fromkeys(spans, 1.0)), blocks)


@pytest.mark.parametrize("alpha", [math.nan, math.inf, -1.6, -1e-9, 10**400, "1.6", True, [1.6]])
def test_alpha_must_be_a_finite_number_that_is_not_negative(alpha: object) -> None:
    with pytest.raises(InvalidValue, match="alpha must be a finite number of at least 0, found"):
        solve(latency(), importance(), alpha=alpha)


def test_numpy_numbers_are_accepted() -> None:
    frontier = solve(latency(), importance(), alpha=np.float32(1.5))
    assert (type(frontier.alpha), frontier.alpha) == (float, 1.5)
    Frontier.loads(frontier.dumps())


def test_arguments_of_another_type_are_refused() -> None:
    with pytest.raises(InvalidValue, match=r"tables are swapped: solve\(\) takes the latency table first"):
        solve(importance(), latency())
    with pytest.raises(InvalidValue, match=r"solve\(\) takes a LatencyTable, .*; found str as latency table"):
        solve("time.csv", importance())
    with pytest.raises(InvalidValue, match=r"solve\(\) takes .*; found LatencyTable as importance table"):
        solve(latency(), latency())
    with pytest.raises(InvalidValue, match=r"solve\(\) takes a LatencyTable, .*; found str as network"):
        solve(latency(), importance(), network="net")
