from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from depthfold.core import Environment, LatencyTable, Plan, Span, Timing
from depthfold.core.latency_table import sum_times
from depthfold.errors import InvalidValue, PlanError, TableError
from structures import chain
from tables import latency_table, timing

PUBLISHED = """,st,end,time,stdev,kernel
0,0.0,1.0,0.5,0.01,3
1,1,2,0.25,,1
2,0,2,0.6,nan,3
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "time.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_published_csv_is_read_with_one_time_for_both_flags(tmp_path: Path) -> None:
    table = LatencyTable.read_csv(write(tmp_path, PUBLISHED), network="net")
    assert table.times == {Span(0, 1): (0.5, 0.5), Span(0, 2): (0.6, 0.6), Span(1, 2): (0.25, 0.25)}
    assert [entry.stdev for entry in table.entries] == [0.01, None, None]
    assert (table.depth, table.original, table.network, table.environment) == (2, 0.75, "net", Environment())


def test_table_survives_json_and_csv(tmp_path: Path) -> None:
    table = LatencyTable(
        network="net",
        environment=Environment(device="CPU", batch=1),
        entries=(
            Timing.measured(Span(0, 1), [0.1, 0.3]),
            Timing(span=Span(0, 2), reason="out of memory"),
            timing(1, 2, 1 / 3),
        ),
    )
    assert LatencyTable.loads(table.dumps()) == table
    table.write_csv(tmp_path / "out.csv")
    again = LatencyTable.read_csv(tmp_path / "out.csv")
    assert again.times == table.times
    assert again.entries[1] == table.entries[1]
    assert (tmp_path / "out.csv").read_text().startswith("st,end,time,stdev,reason\n0,1,0.2,")


def test_both_times_survive_json_and_csv(tmp_path: Path) -> None:
    table = LatencyTable(
        entries=(
            timing(0, 1, 0.5, 0.1),
            Timing(span=Span(0, 2), reason="out of memory"),
            Timing(span=Span(1, 2), times=(1 / 3, 1 / 3), stdev=0.25),
            timing(1, 3, 1.0, 0.0),
            timing(2, 3, 1.25, 1.5),  # the time without an activation may be longer
        ),
    )
    assert table.times == {
        Span(0, 1): (0.1, 0.5), Span(1, 2): (1 / 3, 1 / 3), Span(1, 3): (0.0, 1.0), Span(2, 3): (1.5, 1.25)
    }  # fmt: skip
    assert LatencyTable.loads(table.dumps()) == table
    table.write_csv(tmp_path / "out.csv")
    assert LatencyTable.read_csv(tmp_path / "out.csv") == table
    assert (tmp_path / "out.csv").read_text().startswith("st,end,time,stdev,time_without,reason\n0,1,0.5,,0.1,\n")


def test_csv_has_further_columns_only_if_an_entry_needs_them(tmp_path: Path) -> None:
    table = latency_table({(0, 1): 0.5})
    table.write_csv(tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text() == "st,end,time,stdev\n0,1,0.5,\n"
    with pytest.raises(TableError, match="line 2: column 'time_without' must hold a number, found 'fast'"):
        LatencyTable.read_csv(write(tmp_path, "st,end,time,time_without\n0,1,1,fast\n"))


def test_original_has_the_activations_of_the_network() -> None:
    entries = (timing(0, 1, 0.5, 0.1), timing(1, 2, 0.25, 0.125), timing(0, 2, 9.0))
    assert LatencyTable(entries=entries).original == 0.75  # not known: every layer has an activation
    table = LatencyTable(entries=entries, activations=frozenset({1}))
    assert (table.layers, table.original) == ((0.5, 0.125), 0.625)
    assert LatencyTable.loads(table.dumps()) == table
    lacking = LatencyTable(entries=(entries[0], Timing(span=Span(1, 2), reason="no")), activations=frozenset())
    assert (lacking.layers, lacking.original) == ((0.1, None), None)


@pytest.mark.parametrize("time", [math.nan, math.inf, -0.5, "1"])
def test_bad_times_with_and_without_an_activation_are_refused(time: object) -> None:
    with pytest.raises(TableError, match=r"The latency of \(0, 1\] without an activation (is|must be) .*milliseconds"):
        Timing(span=Span(0, 1), times=(time, 1.0))
    with pytest.raises(TableError, match=r"The latency of \(0, 1\] with an activation (is|must be) .*milliseconds"):
        Timing(span=Span(0, 1), times=(1.0, time))


def test_predict_adds_the_segments_of_a_plan() -> None:
    """Three layers with a barrier at 1, which is always a cut."""
    network = chain(3, 3, 3, barriers=(1,))
    table = LatencyTable(
        entries=(
            timing(0, 1, 1.0, 0.5),
            timing(1, 2, 20.0, 10.0),
            timing(2, 3, 300.0, 200.0),
            timing(1, 3, 4000.0),
        ),
    )
    assert table.predict(network, network.vanilla) == table.original == 321.0
    assert table.predict(network, Plan({1, 3}, (1, 2))) == 1 + 10 + 300
    assert table.predict(network, Plan({2}, (1, 2))) == 0.5 + 20 + 300  # the activation at the end stays
    assert table.predict(network, Plan((), ())) == 0.5 + 4000
    assert table.predict(network, Plan({1, 3}, (1,))) == 1 + 4000
    tenths = latency_table({(l, l + 1): 0.1 for l in range(10)})
    ten = chain(*[3] * 10)
    assert tenths.predict(ten, ten.vanilla) == tenths.original == 1.0
    with pytest.raises(TableError, match=r"no time for \(0, 2\], which the plan merges"):
        tenths.predict(ten, Plan({2}, range(2, 10)))


def test_predict_takes_a_network_and_a_plan() -> None:
    network = chain(3)
    table = latency_table({(0, 1): 1.0}, fingerprint=network.fingerprint)
    with pytest.raises(InvalidValue, match=r"predict\(\) takes a network and a plan, found object\. .*trace"):
        table.predict(object(), network.vanilla)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"Expected a plan, found NoneType"):
        table.predict(network, None)  # type: ignore[arg-type]


def test_predict_needs_times_of_the_same_network() -> None:
    network, other = chain(3, 3), chain(3, 5)
    entries = timing(0, 1, 1.0), Timing(span=Span(1, 2), reason="out of memory")
    table = LatencyTable(entries=entries, fingerprint=network.fingerprint)
    with pytest.raises(TableError, match=r"no time for \(1, 2\] \(out of memory\), which the plan merges. Measure it"):
        table.predict(network, network.vanilla)
    with pytest.raises(TableError, match=f"of another network .fingerprint {table.fingerprint}; this one is "):
        table.predict(other, other.vanilla)


def test_measured_entry_keeps_quartiles_and_count_of_its_samples() -> None:
    entry = Timing.measured(Span(0, 1), (1.0, 2.0, 3.0, 5.0, 9.0))
    assert (entry.times, entry.quartiles, entry.count) == ((4.0, 4.0), (2.0, 3.0, 5.0), 5)
    assert entry.stdev == pytest.approx(10**0.5)
    single = Timing.measured(Span(0, 1), [4.0], (1.0, 2.0))
    assert (single.times, single.stdev, single.quartiles, single.count) == ((1.0, 2.0), None, (4.0, 4.0, 4.0), 1)
    assert Timing.measured(Span(0, 1), [1.0, 3.0], scale=2.0).stdev == pytest.approx(2 * 2**0.5)
    assert len(LatencyTable(entries=[Timing.measured(Span(0, 1), [1.0] * 10_000)]).dumps()) < 1_000


def test_original_is_unknown_without_every_single_layer() -> None:
    entries = (timing(0, 2, 1.0), timing(1, 2, 1.0))
    assert LatencyTable(entries=entries).original is None


def test_str_counts_spans_and_layers() -> None:
    table = LatencyTable(network="net", entries=(timing(0, 1, 1.5), Timing(span=Span(0, 2), reason="no")))
    assert str(table) == (
        "Latency table of net: 1 span, 1 without a time, 2 layers, single layers unknown in all; "
        "environment: not stated"
    )


@pytest.mark.parametrize(
    ("time", "message"),
    [
        (math.nan, r"The latency of \(0, 1\].* is nan ms; expected milliseconds from 0 to 1e\+06"),
        (math.inf, r"The latency of \(0, 1\] is inf ms; expected milliseconds from 0 to 1e\+06"),
        (-math.inf, r"The latency of \(0, 1\] is -inf ms; expected milliseconds from 0 to 1e\+06"),
        (-0.5, r"The latency of \(0, 1\] is -0\.5 ms; expected milliseconds from 0 to 1e\+06"),
    ],
)
def test_bad_times_are_refused(time: float, message: str, tmp_path: Path) -> None:
    with pytest.raises(TableError, match=message):
        timing(0, 1, time)
    with pytest.raises(TableError, match=message):
        LatencyTable.read_csv(write(tmp_path, f"st,end,time,stdev\n0,1,{time},0\n"))
    with pytest.raises(TableError, match=f"A sample of {message[0].lower()}{message[1:]}"):
        Timing.measured(Span(0, 1), (time,))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "",
            "'st' is missing. Expected the columns st,end,time and optionally stdev,time_without,shape,reason; found",
        ),
        ("st,end,ms,stdev\n", "the column 'time' is missing. .* found st,end,ms,stdev"),
        ("st,end,time,stdev\n", r"time\.csv: The latency table is empty: it needs an entry for every span"),
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
        ("st,end,time,stdev\n\n0,1,-1,2\n", r"csv, line 3: The latency of \(0, 1\] is -1 ms"),
        (
            "st,end,time,stdev\n0,1,1e30,2\n",
            r"csv, line 2: The latency of \(0, 1\] is 1e\+30 ms; expected",
        ),
        ("st,end,time,stdev\n0,1,True,0\n", "line 2: column 'time' must hold a number, found 'True'"),
        ("st,end,time,stdev\nFalse,True,1,0\n", "line 2: column 'st' must hold a number, found 'False'"),
        ("st,end,time,time\n0,1,1,2\n", "the column 'time' appears twice"),
        ("st,end,time,stdev,stdev\n0,1,1,2,3\n", "the column 'stdev' appears twice"),
        ("st,end,time,note\n0,1,1," + "x" * 200_000, r"line 2: this is not CSV: field larger than field limit"),
    ],
)
def test_bad_csv_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(TableError, match=message):
        LatencyTable.read_csv(write(tmp_path, text))


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="cannot be read: No such file"):
        LatencyTable.read_csv(tmp_path / "none.csv")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(TableError, match="is not text"):
        LatencyTable.read_csv(tmp_path / "binary")


def test_entry_must_have_either_times_or_a_reason() -> None:
    for fields in ({}, {"times": (1.0, 1.0), "reason": "no"}):
        with pytest.raises(TableError, match="must have either times or the reason why it has none"):
            Timing(span=Span(0, 1), **fields)
    with pytest.raises(TableError, match="needs at least one sample"):
        Timing.measured(Span(0, 1), [])
    with pytest.raises(TableError, match="The latency table is empty"):
        LatencyTable(entries=())


def test_sums_are_in_whole_picoseconds() -> None:
    assert sum_times([0.1] * 10) == 1.0
    assert sum_times([0.1, 0.2]) == 0.3
    assert sum_times([1e-12, 1e-12]) == 2e-9


def test_csv_without_stdev_and_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / "bom.csv").write_bytes(b"\xef\xbb\xbfst,end,time,x,x\r\n0,1,0.5,1,2\r\n")
    table = LatencyTable.read_csv(tmp_path / "bom.csv")
    assert table.entries == (timing(0, 1, 0.5),)


def test_line_number_is_that_of_the_file(tmp_path: Path) -> None:
    text = 'st,end,time,note\n0,1,1,"two\nlines"\n0,2,fast,\n'
    with pytest.raises(TableError, match="line 4: column 'time' must hold a number, found 'fast'"):
        LatencyTable.read_csv(write(tmp_path, text))


def test_lists_and_numpy_numbers_are_accepted() -> None:
    entry = Timing(span=Span(0, 1), times=(np.float32(0.25), np.float32(0.5)), stdev=np.float64(0.25))
    assert entry == Timing(span=Span(0, 1), times=(0.25, 0.5), stdev=0.25)
    assert [type(value) for value in (*entry.times, entry.stdev)] == [float] * 3
    measured = Timing.measured(Span(1, 2), np.array([1.0, 2.0]))
    assert [type(value) for value in (*measured.quartiles, measured.count)] == [float, float, float, int]
    table = LatencyTable(entries=[entry, measured])
    assert hash(table) == hash(LatencyTable.loads(table.dumps()))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"times": ("1", "1")}, r"The latency of \(0, 1\] must be milliseconds from 0 on, found '1'"),
        ({"times": (True, True)}, "must be milliseconds from 0 on, found True"),
        ({"times": (1.0, 1.0), "stdev": "0"}, "The standard deviation .* must be a number from 0 on"),
    ],
)
def test_times_must_be_numbers(fields: dict[str, object], message: str) -> None:
    with pytest.raises(TableError, match=message):
        Timing(span=Span(0, 1), **fields)


def test_repr_is_short() -> None:
    assert repr(latency_table({(0, 1): 1.0})) == "<LatencyTable (unnamed): 1 span, 1 layer>"
