"""Suggestions, amounts, times and errors as text."""

import pytest

from depthfold.support.text import amount, did_you_mean, duration, listed, one_line

KNOWN = ("latency", "late", "budget", "{braces}")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("latncy", "Did you mean 'latency'? "),
        ("braces", "Did you mean '{braces}'? "),
        ("zzz", ""),
        ("", ""),
    ],
)
def test_did_you_mean_suggests_the_closest_name(name, expected):
    assert did_you_mean(name, KNOWN) == expected
    assert did_you_mean(name, iter(KNOWN)) == expected


def test_did_you_mean_formats_several_suggestions():
    text = did_you_mean("laten", KNOWN, lambda close: f"--{close}", most=2)
    assert text == "Did you mean --late or --latency? "
    assert did_you_mean("laten", KNOWN, most=2, cutoff=0.85) == "Did you mean 'late'? "


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (0, "0"),
        (510, "510"),
        (999.5, "999.5"),
        (1_000, "1 k"),
        (78_510, "78.51 k"),
        (999_949, "999.9 k"),
        (999_999, "1 M"),
        (6.021e13, "60.21 T"),
        (3_504_872, "3.505 M"),
        (15_470_264_320, "15.47 G"),
    ],
)
def test_amount_has_four_digits_and_a_unit(number, expected):
    assert amount(number) == expected


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (0, "0"),
        (510, "510"),
        (78_510, "79 k"),
        (99_499_999, "99 M"),
        (99_500_000, "100 M"),
        (123_456_789, "123 M"),
        (999_400_000, "999 M"),
        (999_600_000, "1 G"),
        (15_470_264_320, "15 G"),
    ],
)
def test_amount_with_fewer_digits_rounds_no_digit_before_the_point_away(number, expected):
    assert amount(number, digits=2) == expected


def test_one_line_removes_line_breaks_and_colours():
    assert one_line(ValueError("This is \x1b[96mstep 3/3\x1b[0m\n of\texporting")) == "This is step 3/3 of exporting"
    assert one_line(KeyError()) == "KeyError"
    assert len(one_line(ValueError("x" * 400))) == 300


def test_durations_are_rough():
    assert [duration(s) for s in (0.1, 80, 300, 9000, 300_000)] == ["1 s", "80 s", "5 minutes", "2.5 hours", "3.5 days"]


@pytest.mark.parametrize(
    ("items", "expected"),
    [((), ""), ((1,), "1"), ((1, 2, 3), "1, 2, 3"), ((1, 2, 3, 4), "1, 2, 3 and 1 more")],
)
def test_long_lists_say_how_many_more_there_are(items, expected):
    assert listed(items, 3) == expected
    assert listed(items, 3, "; ") == expected.replace(",", ";")
