from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from depthfold.core import Environment, FlaggedSpan, ImportanceTable, Score
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


def test_published_csv_is_read(tmp_path: Path) -> None:
    table = ImportanceTable.read_csv(write(tmp_path, PUBLISHED))
    assert table.importances == {
        FlaggedSpan(0, 1, True, True): -0.5,
        FlaggedSpan(0, 2, True, True): -0.001,
        FlaggedSpan(1, 2, True, False): -0.25,
    }
    assert (table.depth, table.base, table.extended) == (2, 0.0, True)


def test_importance_is_the_mean_score_minus_the_base_score(tmp_path: Path) -> None:
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
    text = "1 flagged span, 1 without a score, 2 layers, base score 0.75, plain problem"
    assert str(table).endswith(f"{text}; environment: input size 3x32x32")
    assert str(replace(table, environment=Environment())).endswith(text)


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_scores_must_be_finite(score: float) -> None:
    with pytest.raises(TableError, match=r"A score of \(0, 1\], flags 11 is .*; expected a finite number"):
        Score(span=FlaggedSpan(0, 1, True, True), samples=(score,))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("st,end,imp\n", "the column 'st_act' is missing"),
        ("st,end,st_act,end_act,imp\n", r"imp\.csv: The importance table is empty"),
        ("st,end,st_act,end_act,imp\n0,1,2,1,0\n", "line 2: column 'st_act' must hold 0 or 1, found '2'"),
        ("st,end,st_act,end_act,imp\n0,1,1,1,True\n", "line 2: column 'imp' must hold a number, found 'True'"),
        ("st,end,st_act,end_act,imp,st_act\n0,1,1,1,0,0\n", "the column 'st_act' appears twice"),
        ("st,end,st_act,end_act,imp\n0,1,1,1,nan\n", "line 2: A score of .* is nan; expected a finite number"),
        ("st,end,st_act,end_act,imp\n0,1,1,1,0\n0,1,1,1,1\n", r"two entries for \(0, 1\], flags 11"),
    ],
)
def test_bad_csv_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(TableError, match=message):
        ImportanceTable.read_csv(write(tmp_path, text))


def test_empty_entries_and_tables_are_refused() -> None:
    with pytest.raises(TableError, match="must have either scores or the reason"):
        Score(span=FlaggedSpan(0, 1, True, True))
    with pytest.raises(TableError, match="The importance table is empty"):
        ImportanceTable(entries=())
    with pytest.raises(TableError, match="The base score of the importance table is nan"):
        ImportanceTable(base=math.nan, entries=(Score(span=FlaggedSpan(0, 1, True, True), samples=(1.0,)),))


def test_lists_and_numpy_numbers_are_accepted() -> None:
    entry = Score(span=FlaggedSpan(0, 1, True, True), samples=[np.float32(0.5), 1])
    assert entry.samples == (0.5, 1.0)
    assert {type(score) for score in entry.samples} == {float}
    known = Score(span=entry.span, samples=[0.5], seeds=np.array([7]))
    assert type(known.seeds[0]) is int
    assert hash(known) == hash(Score(span=entry.span, samples=(0.5,), seeds=(7,)))
    table = ImportanceTable(entries=[entry], base=np.float64(0.5))
    assert type(table.base) is float
    assert hash(table) == hash(ImportanceTable.loads(table.dumps()))


def test_scores_must_be_numbers_with_one_seed_each() -> None:
    span = FlaggedSpan(0, 1, True, True)
    with pytest.raises(TableError, match=r"A score of .* must be a finite number, found True"):
        Score(span=span, samples=(True,))
    with pytest.raises(TableError, match=r"has 1 scores and 2 seeds; expected one for each score, or none at all"):
        Score(span=span, samples=(1.0,), seeds=(1, 2))


def test_number_beyond_the_floats_is_refused() -> None:
    table = ImportanceTable(entries=[Score(span=FlaggedSpan(0, 1, True, True), samples=(0.5,))])
    for huge in ("1" + "0" * 400, "1" + "0" * 5000):
        with pytest.raises(InvalidValue, match=r"too large for a float|This is not JSON"):
            ImportanceTable.loads(table.dumps().replace("0.5", huge))


def test_repr_is_short() -> None:
    table = ImportanceTable(network="net", entries=[Score(span=FlaggedSpan(0, 2, True, True), samples=(1.0,))])
    assert repr(table) == "<ImportanceTable net: 1 flagged span, 2 layers>"
