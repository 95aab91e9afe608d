from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from depthfold.core import Environment, FlaggedSpan, LatencyTable, Plan, Span, Timing
from depthfold.core.latency_table import sum_rounded_up
from depthfold.errors import InvalidValue, TableError
from structures import chain

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


def test_bare_times_survive_json_and_csv(tmp_path: Path) -> None:
    table = LatencyTable(
        entries=(
            Timing(span=Span(0, 1), time=0.5, bare=0.1),
            Timing(span=Span(0, 2), reason="out of memory"),
            Timing(span=Span(1, 2), time=1 / 3, stdev=0.25),
            Timing(span=Span(1, 3), time=1.0, bare=0.0),
            Timing(span=Span(2, 3), time=1.0, bare=1.5, active=1.25),  # nobody says that it must be less
        ),
    )
    assert table.times == {Span(0, 1): 0.5, Span(1, 2): 1 / 3, Span(1, 3): 1.0, Span(2, 3): 1.0}
    assert table.times_if(False) == {Span(0, 1): 0.1, Span(1, 2): 1 / 3, Span(1, 3): 0.0, Span(2, 3): 1.5}
    assert table.times_if(True) == {Span(0, 1): 0.5, Span(1, 2): 1 / 3, Span(1, 3): 1.0, Span(2, 3): 1.25}
    assert table.original == sum_rounded_up([0.5, 1 / 3, 1.0])
    assert LatencyTable.loads(table.dumps()) == table
    table.write_csv(tmp_path / "out.csv")
    assert LatencyTable.read_csv(tmp_path / "out.csv") == table
    assert (tmp_path / "out.csv").read_text().startswith("st,end,time,stdev,active,bare,reason\n0,1,0.5,,,0.1,\n")


def test_files_of_before_have_no_bare_times(tmp_path: Path) -> None:
    table = LatencyTable(entries=(Timing(span=Span(0, 1), time=0.5),))
    data = table.to_json()
    del data["entries"][0]["bare"], data["entries"][0]["active"]  # as it was written before
    assert LatencyTable.from_json(data) == table
    table.write_csv(tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text() == "st,end,time,stdev\n0,1,0.5,\n"
    published = LatencyTable.read_csv(write(tmp_path, PUBLISHED))
    assert published.times_if(False) == published.times_if(True) == published.times
    assert [(entry.active, entry.bare) for entry in published.entries] == [(None, None)] * 3


@pytest.mark.parametrize(
    ("time", "message"),
    [
        (math.nan, r"an activation is NaN"),
        (math.inf, r"an activation is infinite"),
        (-0.5, r"an activation is negative \(-0\.5 ms\)"),
        ("1", r"an activation must be milliseconds from 0 on, found '1'"),
    ],
)
def test_refuses_bad_times_with_and_without_an_activation(time: object, message: str) -> None:
    with pytest.raises(TableError, match=r"The latency of \(0, 1\] without " + message):
        Timing(span=Span(0, 1), time=1.0, bare=time)
    with pytest.raises(TableError, match=r"The latency of \(0, 1\] with " + message):
        Timing(span=Span(0, 1), time=1.0, active=time)


def test_refuses_a_bare_time_of_what_has_no_time(tmp_path: Path) -> None:
    message = r"The latency entry \(0, 1\] has a time without an activation \(2 ms\) and a reason why it has no time"
    with pytest.raises(TableError, match=message):
        Timing(span=Span(0, 1), bare=2.0, reason="out of memory")
    with pytest.raises(TableError, match=f"line 2: {message}"):
        LatencyTable.read_csv(write(tmp_path, "st,end,time,bare,reason\n0,1,,2,out of memory\n"))
    with pytest.raises(TableError, match="line 2: column 'bare' must hold a number, found 'fast'"):
        LatencyTable.read_csv(write(tmp_path, "st,end,time,bare\n0,1,1,fast\n"))


def test_predicts_what_a_plan_takes() -> None:
    """Three layers with a barrier at 1, which is a cut whether the plan says so or not."""
    network = chain(3, 3, 3, barriers=(1,))
    table = LatencyTable(
        entries=(
            Timing(span=Span(0, 1), time=1.0, bare=0.5),
            Timing(span=Span(1, 2), time=20.0, bare=10.0),
            Timing(span=Span(2, 3), time=300.0, bare=200.0),
            Timing(span=Span(1, 3), time=4000.0),
        ),
    )
    assert table.predict(network, network.vanilla) == table.original == 321.0
    assert table.predict(network, Plan({1, 3}, (1, 2))) == 1 + 10 + 300
    assert table.predict(network, Plan({2}, (1, 2))) == 0.5 + 20 + 300  # the network's own at the end stays
    assert table.predict(network, Plan((), ())) == 0.5 + 4000  # whoever gives one time means both
    assert table.predict(network, Plan({1, 3}, (1,))) == 1 + 4000
    tenths = LatencyTable(entries=tuple(Timing(span=Span(l, l + 1), time=0.1) for l in range(10)))
    ten = chain(*[3] * 10)
    assert tenths.predict(ten, ten.vanilla) == tenths.original > 1.0
    with pytest.raises(TableError, match=r"no time for \(0, 2\], which the plan merges"):
        tenths.predict(ten, Plan({2}, range(2, 10)))


def test_predicts_for_a_network_and_a_plan_and_nothing_else() -> None:
    network = chain(3)
    table = LatencyTable(entries=(Timing(span=Span(0, 1), time=1.0),), fingerprint=network.fingerprint)
    for given, found in (((object(), network.vanilla), "object and Plan"), ((network, None), "Network and NoneType")):
        with pytest.raises(InvalidValue, match=rf"predict\(\) takes a network and a plan, found {found}\. .*trace"):
            table.predict(*given)  # type: ignore[arg-type]


def test_predicts_only_with_times_of_the_same_network() -> None:
    network, other = chain(3, 3), chain(3, 5)
    entries = Timing(span=Span(0, 1), time=1.0), Timing(span=Span(1, 2), reason="out of memory")
    table = LatencyTable(entries=entries, fingerprint=network.fingerprint)
    with pytest.raises(TableError, match=r"no time for \(1, 2\] \(out of memory\), which the plan merges. Measure it"):
        table.predict(network, network.vanilla)
    with pytest.raises(TableError, match=f"of another network .fingerprint {table.fingerprint}; this one is "):
        table.predict(other, other.vanilla)


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
        (
            "",
            "'st' is missing. Expected the columns st,end,time, if you like also stdev,active,bare,reason; found an",
        ),
        ("st,end,ms,stdev\n", "the column 'time' is missing. .* found st,end,ms,stdev"),
        ("st,end,time,stdev\n", "the latency table is empty; expected one line per span"),
        ("st,end,time,stdev\n0,1,fast,0\n", "line 2: column 'time' must hold a number, found 'fast'"),
        ("st,end,time,stdev\n0,1,,0\n", "line 2: column 'time' must hold a number, found nothing"),
        ("st,end,time,stdev\n0.5,1,1,0\n", "line 2: column 'st' must hold a whole number, found '0.5'"),
        ("st,end,time,stdev\n\n2,1,1,0\n", "line 3: expected positions 0 <= st < end, found st=2, end=1"),
        ("st,end,time,stdev\n0,1,1\n", "line 2: expected 4 columns, found 3"),
        ("st,end,time,stdev\n0,1,1,0\n0,1,2,0\n", r"time\.csv: .* two entries for \(0, 1\]; keep one"),
        (
            "st,end,time,stdev\n0,1,1,-2\n",
            r"csv, line 2: The standard deviation of \(0, 1\] must be a number from 0 on",
        ),
        ("st,end,time,stdev\n\n0,1,-1,2\n", r"csv, line 3: The latency of \(0, 1\] is negative"),
        ("st,end,time,stdev\n0,1,1e30,2\n", r"csv, line 2: The latency of \(0, 1\] is 1e\+30 ms; expected at most"),
        ("st,end,time,stdev\n0,1,True,0\n", "line 2: column 'time' must hold a number, found 'True'"),
        ("st,end,time,stdev\nFalse,True,1,0\n", "line 2: column 'st' must hold a number, found 'False'"),
        ("st,end,time,time\n0,1,1,2\n", "the column 'time' stands there twice"),
        ("st,end,time,stdev,stdev\n0,1,1,2,3\n", "the column 'stdev' stands there twice"),
        ("st,end,time,note\n0,1,1," + "x" * 200_000, r"line 2: this is not CSV: field larger than field limit"),
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


def test_reads_a_table_without_stdev_and_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "bom.csv").write_bytes(b"\xef\xbb\xbfst,end,time,x,x\r\n0,1,0.5,1,2\r\n")
    table = LatencyTable.read_csv(tmp_path / "bom.csv")
    assert table.entries == (Timing(span=Span(0, 1), time=0.5),)


def test_a_line_is_counted_as_the_file_has_it(tmp_path: Path) -> None:
    text = 'st,end,time,note\n0,1,1,"two\nlines"\n0,2,fast,\n'
    with pytest.raises(TableError, match="line 4: column 'time' must hold a number, found 'fast'"):
        LatencyTable.read_csv(write(tmp_path, text))


def test_lists_and_numbers_of_numpy_are_taken() -> None:
    entry = Timing(span=Span(0, 1), time=np.float32(0.5), stdev=np.float64(0.25), samples=[np.float64(0.25), 1])
    assert entry == Timing(span=Span(0, 1), time=0.5, stdev=0.25, samples=(0.25, 1.0))
    assert [type(value) for value in (entry.time, entry.stdev, *entry.samples)] == [float] * 4
    table = LatencyTable(entries=[entry])
    assert hash(table) == hash(LatencyTable.loads(table.dumps()))
    assert Timing.measured(Span(0, 1), np.array([1.0, 2.0])).samples == (1.0, 2.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"span": FlaggedSpan(0, 1, True, True), "time": 1.0}, r"is of a Span\(i, j\), found FlaggedSpan"),
        ({"span": (0, 1), "time": 1.0}, r"is of a Span\(i, j\), found \(0, 1\)"),
        ({"span": Span(0, 1), "time": "1"}, r"The latency of \(0, 1\] must be milliseconds from 0 on, found '1'"),
        ({"span": Span(0, 1), "time": True}, "must be milliseconds from 0 on, found True"),
        ({"span": Span(0, 1), "time": 1.0, "samples": 1.0}, r"The samples of \(0, 1\] must be several values"),
        ({"span": Span(0, 1), "time": 1.0, "samples": ["1"]}, r"A sample of the latency .* found '1'"),
        ({"span": Span(0, 1), "time": 1.0, "stdev": "0"}, "The standard deviation .* must be a number from 0 on"),
        ({"span": Span(0, 1), "reason": 7}, "The reason of the latency entry .* must be text, found 7"),
    ],
)
def test_refuses_fields_of_the_wrong_kind(fields: dict[str, object], message: str) -> None:
    with pytest.raises(TableError, match=message):
        Timing(**fields)


def test_refuses_a_table_of_the_wrong_things() -> None:
    with pytest.raises(TableError, match="must all be of the kind Timing, found 1"):
        LatencyTable(entries=[1])
    with pytest.raises(TableError, match="The network of a latency table must be text, found 7"):
        LatencyTable(network=7, entries=[Timing(span=Span(0, 1), time=1.0)])


def test_the_short_form() -> None:
    assert (
        repr(LatencyTable(entries=[Timing(span=Span(0, 1), time=1.0)])) == "<LatencyTable (unnamed): 1 span, 1 layer>"
    )
