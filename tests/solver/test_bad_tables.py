"""Every kind of bad input has a message of its own."""

from __future__ import annotations

import math

import pytest

from depthfold.core import Environment, ImportanceTable, LatencyTable, Score, Timing, fingerprint
from depthfold.core.span import FlaggedSpan, Span
from depthfold.errors import InvalidValue, TableError
from depthfold.solver import solve
from structures import plain_chain
from tables import importance_table, latency_table

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
def test_tables_of_another_network(mine: dict[str, str], theirs: dict[str, str], message: str) -> None:
    with pytest.raises(TableError, match=message):
        solve(latency(**mine), importance(**theirs))
    solve(latency(**mine), importance(**mine))
    solve(latency(**mine), importance())


def test_tables_of_another_depth() -> None:
    with pytest.raises(TableError, match="of another network than the latency table: depth 1 against 2"):
        solve(latency(), importance_table({(0, 1, 1, 1): 0.0}))


def test_tables_of_another_environment() -> None:
    gpu, cpu = Environment(device="GPU", batch=128), Environment(device="CPU", batch=128)
    with pytest.raises(TableError, match="of another environment than the latency table: device: GPU against CPU"):
        solve(latency(environment=gpu), importance(environment=cpu))
    assert solve(latency(environment=gpu), importance(environment=Environment(batch=128))).environment == gpu


def test_tables_that_are_not_of_the_given_network() -> None:
    with pytest.raises(TableError, match=r"not of the network 'chain': it has 3 layers .* the latency table has 2"):
        solve(latency(), importance(), network=plain_chain(3))
    with pytest.raises(TableError, match=r"not of the network 'chain': .* and 'abc'"):
        solve(latency(fingerprint="abc"), importance(), network=plain_chain(2))
    cut = plain_chain(2).__class__(name="cut", layers=plain_chain(2).layers, barriers=(1,))
    with pytest.raises(
        TableError, match=r"has \(0, 2\], which does not merge in this network: there is a barrier at 1"
    ):
        solve(latency(), importance(), network=cut)
    mine = plain_chain(2)
    assert solve(latency(fingerprint=fingerprint(mine)), importance(), network=mine).exact


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
    bare = plain_chain(2).__class__(name="bare", layers=(plain_chain(1).layers[0], plain_chain(1, None).layers[0]))
    with pytest.raises(TableError, match=r"no entry for \(1, 2\], flags 10, which the network has. Measure it, or"):
        solve(latency(), importance(), network=bare)


def test_many_missing_entries_are_counted() -> None:
    times = {(i, j): 1.0 for i in range(5) for j in range(i + 1, 6) if i < j <= 5}
    values = {(i, i + 1, 1, 1): 0.0 for i in range(5)}
    with pytest.raises(TableError, match=r"no entry for \(0, 2\], \(0, 3\], .* and 5 more"):
        solve(latency_table(times), importance_table(values))


def test_spans_that_do_not_cover_the_network() -> None:
    times, values = {(0, 1): 1.0, (2, 3): 1.0}, {(0, 1, 1, 1): 0.0, (2, 3, 1, 1): 0.0}
    message = (
        "of the latency table do not cover the network: .* from position 0 to 3; the furthest position reached is 1"
    )
    with pytest.raises(TableError, match=message):
        solve(latency_table(times), importance_table(values))


def test_blocks_that_do_not_cover_the_network() -> None:
    values = {(0, 1, 1, 1): 0.0, (1, 2, 0, 1): 0.0, (0, 2, 0, 1): 0.0}  # after 1 the flags do not fit
    message = "of the importance table do not cover the network: .* the furthest position reached is 1"
    with pytest.raises(TableError, match=message):
        solve(latency(), importance_table(values))


def test_a_reason_instead_of_a_value_is_no_missing_entry() -> None:
    entries = [entry for entry in latency().entries if entry.span != Span(0, 2)]
    untimed = LatencyTable(entries=(*entries, Timing(span=Span(0, 2), reason="out of memory")))
    assert solve(untimed, importance()).points[0].cuts == (1,)
    scores = [entry for entry in importance().entries if entry.span != FlaggedSpan(0, 1, True, True)]
    unscored = ImportanceTable(entries=(*scores, Score(span=FlaggedSpan(0, 1, True, True), reason="diverged")))
    assert [point.activations for point in solve(latency(), unscored).points] == [(2,)]


def test_tables_that_cover_the_network_only_apart() -> None:
    """B must pass the activation at 1, and there is no time for a cut at 1."""
    times = LatencyTable(
        entries=(
            Timing(span=Span(0, 1), reason="out of memory"),
            Timing(span=Span(1, 2), time=1.0),
            Timing(span=Span(0, 2), time=1.0),
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


@pytest.mark.parametrize("labels", [0, -1, 2.5, True])
def test_max_labels(labels: object) -> None:
    with pytest.raises(InvalidValue, match="max_labels must be a whole number from 1 on"):
        solve(latency(), importance(), max_labels=labels)


@pytest.mark.parametrize("original", [0.0, -1.0, math.nan, math.inf])
def test_original(original: float) -> None:
    with pytest.raises(InvalidValue, match="The latency of the original must be positive milliseconds"):
        solve(latency(), importance(), original=original)
