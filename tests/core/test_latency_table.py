from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import pytest

from depthfold.core import Environment, LatencyTable, Span, Timing
from depthfold.core.latency_table import sum_rounded_up
from depthfold.errors import TableError

PUBLISHED = """,st,end,time,stdev,kernel
0,0.0,1.0,0.5,0.01,3
1,1,2,0.25,,1
2,0,2,0.6,nan,3
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "time.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_reads_a_published_table(tmp_path: Path) -> None:
    table = LatencyTable.read_csv(write(tmp_path, PUBLISHED), network="net")
    assert table.times == {Span(0, 1): 0.5, Span(0, 2): 0.6, Span(1, 2): 0.25}
    assert [entry.stdev for entry in table.entries] == [0.01, None, None]
    assert (table.depth, table.original, table.network, table.environment) == (2, 0.75, "net", Environment())


def test_csv_and_json_give_the_same_table_again(tmp_path: Path) -> None:
    table = LatencyTable(
        network="net",
        environment=Environment(device="CPU", batch=1),
        entries=(
            Timing.measured(Span(0, 1), [0.1, 0.3]),
            Timing(span=Span(0, 2), reason="out of memory"),
            Timing(span=Span(1, 2), time=1 / 3),
        ),
    )
    assert LatencyTable.loads(table.dumps()) == table
    table.write_csv(tmp_path / "out.csv")
    again = LatencyTable.read_csv(tmp_path / "out.csv")
    assert again.times == table.times
    assert again.entries[1] == table.entries[1]
    assert (tmp_path / "out.csv").read_text().startswith("st,end,time,stdev,reason\n0,1,0.2,")


def test_measured_entries_keep_their_samples() -> None:
    entry = Timing.measured(Span(0, 1), (1.0, 2.0, 3.0))
    assert (entry.time, entry.stdev, entry.samples) == (2.0, 1.0, (1.0, 2.0, 3.0))
    assert Timing.measured(Span(0, 1), [4.0]).stdev is None


def test_the_original_is_unknown_without_every_single_layer() -> None:
    entries = (Timing(span=Span(0, 2), time=1.0), Timing(span=Span(1, 2), time=1.0))
    assert LatencyTable(entries=entries).original is None


def test_prints_itself() -> None:
    table = LatencyTable(
        network="net", entries=(Timing(span=Span(0, 1), time=1.5), Timing(span=Span(0, 2), reason="no"))
    )
    assert str(table) == (
        "Latency table of net: 1 span, 1 without a time, 2 layers, single layers unknown in all; "
        "environment: not stated"
    )


@pytest.mark.parametrize(
    ("time", "message"),
    [
        (math.nan, r"The latency of \(0, 1\] is NaN"),
        (math.inf, r"The latency of \(0, 1\] is infinite"),
        (-math.inf, r"The latency of \(0, 1\] is infinite"),
        (-0.5, r"The latency of \(0, 1\] is negative \(-0\.5 ms\)"),
    ],
)
def test_refuses_bad_times(time: float, message: str, tmp_path: Path) -> None:
    with pytest.raises(TableError, match=message):
        Timing(span=Span(0, 1), time=time)
    with pytest.raises(TableError, match=message):
        LatencyTable.read_csv(write(tmp_path, f"st,end,time,stdev\n0,1,{time},0\n"))
    with pytest.raises(TableError, match=f"sample of {message[0].lower()}{message[1:]}|{message}"):
        Timing(span=Span(0, 1), time=1.0, samples=(time,))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'st' is missing. Expected the columns st,end,time, if you like also stdev,reason; found an empty file"),
        ("st,end,ms,stdev\n", "the column 'time' is missing. .* found st,end,ms,stdev"),
        ("st,end,time,stdev\n", "the latency table is empty; expected one line per span"),
        ("st,end,time,stdev\n0,1,fast,0\n", "line 2: column 'time' must hold a number, found 'fast'"),
        ("st,end,time,stdev\n0,1,,0\n", "line 2: column 'time' must hold a number, found nothing"),
        ("st,end,time,stdev\n0.5,1,1,0\n", "line 2: column 'st' must hold a whole number, found '0.5'"),
        ("st,end,time,stdev\n\n2,1,1,0\n", "line 3: expected positions 0 <= st < end, found st=2, end=1"),
        ("st,end,time,stdev\n0,1,1\n", "line 2: expected 4 columns, found 3"),
        ("st,end,time,stdev\n0,1,1,0\n0,1,2,0\n", r"two entries for \(0, 1\]; keep one"),
        ("st,end,time,stdev\n0,1,1,-2\n", r"The standard deviation of \(0, 1\] must be a number from 0 on"),
    ],
)
def test_refuses_bad_csv(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(TableError, match=message):
        LatencyTable.read_csv(write(tmp_path, text))


def test_refuses_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="cannot be read: No such file"):
        LatencyTable.read_csv(tmp_path / "none.csv")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(TableError, match="is not text"):
        LatencyTable.read_csv(tmp_path / "binary")


def test_refuses_entries_without_a_time_and_without_a_reason() -> None:
    for fields in ({}, {"time": 1.0, "reason": "no"}):
        with pytest.raises(TableError, match="must have a time, or else the reason why it has none"):
            Timing(span=Span(0, 1), **fields)
    with pytest.raises(TableError, match="needs at least one sample"):
        Timing.measured(Span(0, 1), [])
    with pytest.raises(TableError, match="The latency table is empty"):
        LatencyTable(entries=())


def test_sums_are_rounded_up() -> None:
    tenths = [0.1] * 10
    assert Fraction(sum_rounded_up(tenths)) >= sum(map(Fraction, tenths)) > Fraction(1)
    assert sum_rounded_up([0.5, 0.25]) == 0.75
