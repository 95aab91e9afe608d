from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from depthfold.core import Environment, FlaggedSpan, ImportanceTable, Score, Span
from depthfold.errors import InvalidValue, TableError

PUBLISHED = """st,end,st_act,end_act,imp,acc
0,1,1,1.0,-0.5,70.1
1,2,True,False,-0.25,70.2
0,2,1,1,-1e-3,70.3
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "imp.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_reads_a_published_table(tmp_path: Path) -> None:
    table = ImportanceTable.read_csv(write(tmp_path, PUBLISHED))
    assert table.importances == {
        FlaggedSpan(0, 1, True, True): -0.5,
        FlaggedSpan(0, 2, True, True): -0.001,
        FlaggedSpan(1, 2, True, False): -0.25,
    }
    assert (table.depth, table.base, table.extended) == (2, 0.0, True)


def test_an_importance_is_the_mean_score_minus_the_base_score(tmp_path: Path) -> None:
    table = ImportanceTable(
        network="net",
        base=0.75,
        environment=Environment(input_size=(3, 32, 32)),
        entries=(
            Score(span=FlaggedSpan(0, 1, True, True), samples=(0.5, 0.75)),
            Score(span=FlaggedSpan(0, 2, True, True), reason="diverged"),
        ),
    )
    assert table.importances == {FlaggedSpan(0, 1, True, True): -0.125}
    assert not table.extended
    assert ImportanceTable.loads(table.dumps()) == table
    table.write_csv(tmp_path / "out.csv")
    assert (
        tmp_path / "out.csv"
    ).read_text() == "st,end,st_act,end_act,imp,reason\n0,1,1,1,-0.125,\n0,2,1,1,,diverged\n"
    again = ImportanceTable.read_csv(tmp_path / "out.csv")
    assert again.importances == table.importances
    assert again.entries[1].reason == "diverged"
    assert "1 flagged span, 1 without a score, 2 layers, base score 0.75, plain problem" in str(table)


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_refuses_scores_that_are_not_finite(score: float) -> None:
    with pytest.raises(TableError, match=r"A score of \(0, 1\], flags 11 is .*; expected a finite number"):
        Score(span=FlaggedSpan(0, 1, True, True), samples=(score,))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("st,end,imp\n", "the column 'st_act' is missing"),
        ("st,end,st_act,end_act,imp\n", "the importance table is empty"),
        ("st,end,st_act,end_act,imp\n0,1,2,1,0\n", "line 2: column 'st_act' must hold 0 or 1, found '2'"),
        ("st,end,st_act,end_act,imp\n0,1,1,1,True\n", "line 2: column 'imp' must hold a number, found 'True'"),
        ("st,end,st_act,end_act,imp,st_act\n0,1,1,1,0,0\n", "the column 'st_act' appears twice"),
        ("st,end,st_act,end_act,imp\n0,1,1,1,nan\n", "line 2: A score of .* is nan; expected a finite number"),
        ("st,end,st_act,end_act,imp\n0,1,1,1,0\n0,1,1,1,1\n", r"two entries for \(0, 1\], flags 11"),
    ],
)
def test_refuses_bad_csv(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(TableError, match=message):
        ImportanceTable.read_csv(write(tmp_path, text))


def test_refuses_empty_entries_and_tables() -> None:
    with pytest.raises(TableError, match="must have scores, or else the reason"):
        Score(span=FlaggedSpan(0, 1, True, True))
    with pytest.raises(TableError, match="The importance table is empty"):
        ImportanceTable(entries=())
    with pytest.raises(TableError, match="The base score of the importance table is nan"):
        ImportanceTable(base=math.nan, entries=(Score(span=FlaggedSpan(0, 1, True, True), samples=(1.0,)),))


def test_lists_and_numbers_of_numpy_are_taken() -> None:
    entry = Score(span=FlaggedSpan(0, 1, True, True), samples=[np.float32(0.5), 1])
    assert entry.samples == (0.5, 1.0)
    assert {type(score) for score in entry.samples} == {float}
    curve = [[np.int64(3), np.float32(0.25), 1]]
    known = Score(span=entry.span, samples=[0.5], seeds=np.array([7]), curves=[curve])
    assert (known.seeds, known.curves) == ((7,), (((3, 0.25, 1.0),),))
    assert type(known.seeds[0]) is type(known.curves[0][0][0]) is int
    assert hash(known) == hash(Score(span=entry.span, samples=(0.5,), seeds=(7,), curves=(((3, 0.25, 1.0),),)))
    table = ImportanceTable(entries=[entry], base=np.float64(0.5))
    assert type(table.base) is float
    assert hash(table) == hash(ImportanceTable.loads(table.dumps()))


SCORED = {"span": FlaggedSpan(0, 1, True, True), "samples": (1.0,)}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"span": Span(0, 1), "samples": (1.0,)}, r"is of a FlaggedSpan\(i, j, a, b\), found Span"),
        ({"span": FlaggedSpan(0, 1, 1, 1), "samples": 0.5}, r"The scores of .* must be a sequence"),
        ({"span": FlaggedSpan(0, 1, 1, 1), "samples": (True,)}, r"A score of .* must be a finite number, found True"),
        ({"span": FlaggedSpan(0, 1, 1, 1), "reason": 7}, r"The reason of .* must be text, found 7"),
        (SCORED | {"seeds": 5}, r"The seeds of \(0, 1\], flags 11 must be a sequence, found 5"),
        (SCORED | {"seeds": ("5",)}, r"A seed of \(0, 1\], flags 11 must be an integer of at least 0, found '5'"),
        (SCORED | {"curves": 5}, r"The learning curves of .* must be a sequence, found 5"),
        (SCORED | {"curves": (5,)}, r"A learning curve of .* must be a sequence, found 5"),
        (SCORED | {"curves": ((5,),)}, r"A point of a learning curve of .* must be a sequence, found 5"),
        (SCORED | {"curves": (((1, 2.0),),)}, r"has the point \(1, 2\.0\); expected \(step, loss, score\)\.$"),
        (
            SCORED | {"curves": (((1.5, 2.0, 3.0),),)},
            r"A learning curve of .*: a step must be an integer of at least 0",
        ),
        (
            SCORED | {"curves": (((1, "2", 3.0),),)},
            r"A learning curve of .*: a loss must be a finite number, found '2'",
        ),
        (
            SCORED | {"curves": (((1, 2.0, math.nan),),)},
            r"A learning curve of .*: a score is nan; expected a finite num",
        ),
    ],
)
def test_refuses_fields_of_the_wrong_kind(fields: dict[str, object], message: str) -> None:
    with pytest.raises(TableError, match=message):
        Score(**fields)


def test_a_document_with_a_number_beyond_the_floats() -> None:
    table = ImportanceTable(entries=[Score(span=FlaggedSpan(0, 1, True, True), samples=(0.5,))])
    for huge in ("1" + "0" * 400, "1" + "0" * 5000):
        with pytest.raises(InvalidValue, match=r"too large for a float|This is not JSON"):
            ImportanceTable.loads(table.dumps().replace("0.5", huge))


def test_the_short_form() -> None:
    table = ImportanceTable(network="net", entries=[Score(span=FlaggedSpan(0, 2, True, True), samples=(1.0,))])
    assert repr(table) == "<ImportanceTable net: 1 flagged span, 2 layers>"
