"""Tables, plans and frontiers with dropped layers and branches: documents, CSV files, printing and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from depthfold.core import (
    Drops,
    FlaggedSpan,
    Frontier,
    ImportanceTable,
    LatencyTable,
    Plan,
    Score,
    Span,
    Timing,
)
from depthfold.core.options import Move
from depthfold.errors import InvalidValue, PlanError, TableError
from depthfold.solver import solve
from structures import Builder, chain, resnet34, shape
from tables import only_outside, tables_with_moves

BOTH = Drops([3], [Span(4, 6)])


@pytest.fixture(scope="module")
def tables() -> tuple[LatencyTable, ImportanceTable]:
    return tables_with_moves(resnet34(), "paper", get_args(Move), 1)


@pytest.fixture(scope="module")
def frontier(tables: tuple[LatencyTable, ImportanceTable]) -> Frontier:
    return solve(*tables, network=resnet34())


def test_documents_with_drops_are_read_back(tables: tuple[LatencyTable, ImportanceTable], frontier: Frontier) -> None:
    latency, importance = tables
    assert LatencyTable.loads(latency.dumps()) == latency
    assert ImportanceTable.loads(importance.dumps()) == importance
    assert Frontier.loads(frontier.dumps()) == frontier
    solved = frontier[0]
    assert solved.plan.dropped
    assert type(solved).loads(solved.dumps()) == solved


def test_documents_without_drops_have_no_new_field() -> None:
    timing, score = Timing(span=Span(0, 1), times=(1.0, 1.0)), Score(span=FlaggedSpan(0, 1, True, True), samples=(1.0,))
    documents = LatencyTable(entries=(timing,)), ImportanceTable(entries=(score,)), Plan([1], [1])
    for document in documents:
        text = document.dumps()
        assert "shape" not in text and "dropped" not in text
        assert type(document).loads(text) == document
    assert "dropped" not in solve(*documents[:2]).dumps()


def test_csv_files_with_drops_are_read_back(tables: tuple[LatencyTable, ImportanceTable], tmp_path: Path) -> None:
    latency, importance = tables
    latency.write_csv(tmp_path / "time.csv")
    importance.write_csv(tmp_path / "imp.csv")
    assert LatencyTable.read_csv(tmp_path / "time.csv").shape_times == latency.shape_times
    assert ImportanceTable.read_csv(tmp_path / "imp.csv").options == importance.options


def test_drops_in_csv_are_layers_and_branches(tmp_path: Path) -> None:
    score = Score(span=FlaggedSpan(2, 6, True, True), samples=(0.5,), dropped=BOTH)
    table = ImportanceTable(entries=(score,))
    table.write_csv(tmp_path / "imp.csv")
    assert (tmp_path / "imp.csv").read_text() == "st,end,st_act,end_act,imp,dropped\n2,6,1,1,0.5,3 4:6\n"
    assert ImportanceTable.read_csv(tmp_path / "imp.csv") == table


@pytest.mark.parametrize("cell", ["x", "3 4:5:6", "1.5", "0", "6:4"])
def test_bad_drops_in_csv_are_refused(tmp_path: Path, cell: str) -> None:
    (tmp_path / "imp.csv").write_text(f"st,end,st_act,end_act,imp,dropped\n2,6,1,1,0.5,{cell}\n")
    with pytest.raises(
        TableError, match="line 2: column 'dropped': Expected numbers of layers and ends of branches, as"
    ):
        ImportanceTable.read_csv(tmp_path / "imp.csv")


@pytest.mark.parametrize(
    ("cell", "message"), [("5x5", "must hold the JSON of a shape"), ("{}", "'dilation' is missing")]
)
def test_bad_shape_in_csv_is_refused(tmp_path: Path, cell: str, message: str) -> None:
    (tmp_path / "time.csv").write_text(f"st,end,time,shape\n0,2,1.0,{cell}\n")
    with pytest.raises(TableError, match=message):
        LatencyTable.read_csv(tmp_path / "time.csv")


def test_entries_with_drops_have_their_own_accessors() -> None:
    own = shape(4, 4)
    span, block = Span(0, 2), FlaggedSpan(0, 2, True, True)
    latency = LatencyTable(
        entries=(Timing(span=span, times=(1.0, 2.0), shape=own), Timing(span=span, times=(3.0, 4.0)))
    )
    assert latency.times == {span: (3.0, 4.0)}
    assert latency.shape_times == {(span, None): (3.0, 4.0), (span, own): (1.0, 2.0)}
    importance = ImportanceTable(
        entries=(Score(span=block, samples=(1.0,), dropped=Drops([2])), Score(span=block, samples=(2.0,)))
    )
    assert importance.importances == {block: 2.0}
    assert importance.options == {(block, Drops()): 2.0, (block, Drops([2])): 1.0}
    assert "1 more shape with dropped layers" in str(latency)
    assert repr(latency) == "<LatencyTable (unnamed): 2 entries, 2 layers>"
    assert ": 2 entries, 1 with dropped layers, 2 layers, base score" in str(importance)
    assert repr(importance) == "<ImportanceTable (unnamed): 2 entries, 2 layers>"
    failed = Score(span=FlaggedSpan(0, 1, True, True), reason="the loss is NaN")
    more = ImportanceTable(entries=(*importance.entries, failed))
    assert ": 3 entries, 1 with dropped layers, 1 without a score, 2 layers" in str(more)


def test_two_entries_of_one_option_are_refused() -> None:
    timing = Timing(span=Span(0, 2), times=(1.0, 1.0), shape=shape(4, 4))
    with pytest.raises(TableError, match=r"two entries for \(0, 2\] as 3x3, 4 -> 4; keep one"):
        LatencyTable(entries=(timing, timing))
    score = Score(span=FlaggedSpan(0, 2, True, True), samples=(1.0,), dropped=Drops([2]))
    with pytest.raises(TableError, match=r"two entries for \(0, 2\], flags 11 without layer 2; give"):
        ImportanceTable(entries=(score, score))


def test_score_that_drops_a_layer_outside_its_span_is_refused() -> None:
    with pytest.raises(TableError, match="drops something outside its span"):
        Score(span=FlaggedSpan(0, 2, True, True), samples=(1.0,), dropped=Drops([3]))


def test_frontier_prints_what_is_dropped(frontier: Frontier) -> None:
    assert "dropped layers" in str(frontier)
    text = str(frontier[0])
    assert f"; drops {frontier[0].plan.dropped}; boundaries at" in text
    empty = sum(segment.empty for segment in frontier[0].segments)
    assert empty and text.count(", all dropped") == empty
    assert f"{len(frontier[0].segments) - empty} convolutions;" in text


def test_frontier_whose_point_lacks_a_segment_is_refused(frontier: Frontier) -> None:
    data = frontier.to_json()
    data["points"][0]["dropped"] = {"layers": [4], "branches": []}
    with pytest.raises(InvalidValue, match=r"needs the segment \(.*\] without layer 4, which the frontier lacks"):
        Frontier.from_json(data)


def residual_of_two() -> Builder:
    """Layers 1 to 4 of 3x3; the residual 1 -> 3."""
    build = Builder(4, 16)
    for l in range(1, 5):
        build.add(4)
        if l == 3:
            build.skip(1)
    return build


def test_prediction_of_a_plan_with_drops_adds_what_is_left() -> None:
    network = residual_of_two().network("net")
    entries = [Timing(span=Span(l - 1, l), times=(10.0**-l, 2 * 10.0**-l)) for l in range(1, 5)]
    entries.append(Timing(span=Span(0, 3), times=(5.0, 6.0), shape=shape(4, 4)))
    latency = LatencyTable(entries=tuple(entries), calibration=only_outside(0.5))
    branch = Drops(branches=[Span(1, 3)])
    assert latency.predict(network, Plan([1, 3, 4], [1, 3], branch)) == 0.2012  # the activation at 3 takes 0.001
    assert latency.predict(network, Plan([1, 4], [1, 3], branch)) == 0.2002
    assert latency.predict(network, Plan([3, 4], [3], branch)) == 6.0002
    assert latency.predict(network, Plan([3, 4], [1, 3], Drops([1], [Span(1, 3)]))) == 0.5012


def test_segment_that_would_compute_2x_is_refused() -> None:
    latency = LatencyTable(entries=tuple(Timing(span=Span(l - 1, l), times=(1.0, 1.0)) for l in range(1, 5)))
    with pytest.raises(PlanError, match=r"drops all layers of the segment \(1, 3\], so that only the addition"):
        latency.predict(residual_of_two().network("net"), Plan([1, 3, 4], [1, 3], Drops([2, 3])))


def test_addition_after_an_empty_segment_has_no_time() -> None:
    latency = LatencyTable(entries=tuple(Timing(span=Span(l - 1, l), times=(1.0, 1.0)) for l in range(1, 5)))
    with pytest.raises(TableError, match=r"no time for \(2, 3\] as 1x1, 4 -> 4"):
        latency.predict(residual_of_two().network("net"), Plan([1, 3, 4], [1, 2, 3], Drops([3])))


def test_prediction_without_a_time_for_the_shape_names_it() -> None:
    latency = LatencyTable(entries=(Timing(span=Span(0, 2), times=(1.0, 1.0)),))
    with pytest.raises(TableError, match=r"no time for \(0, 2\] as 3x3, 4 -> 4, which the plan"):
        latency.predict(chain(3, 3), Plan([2], [], Drops([2])))
