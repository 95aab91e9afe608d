from __future__ import annotations

import math
from pathlib import Path

import pytest

from depthfold.core import Environment, FlaggedSpan, ImportanceTable, Score
from depthfold.errors import TableError

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
        ("st,end,st_act,end_act,imp\n0,1,1,1,nan\n", "A score of .* is nan; expected a finite number"),
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
