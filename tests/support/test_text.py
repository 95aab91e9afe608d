"""How numbers are put into words, and names that are nearly right into sentences."""

import pytest

from depthfold.support.text import amount, did_you_mean, one_line

KNOWN = ("latency", "late", "budget", "{braces}")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("latncy", "Did you mean 'latency'? "),
        ("braces", "Did you mean '{braces}'? "),
        ("zzz", ""),
        ("", ""),
    ],
)
def test_the_closest_name_or_nothing(name, said):
    assert did_you_mean(name, KNOWN) == said
    assert did_you_mean(name, iter(KNOWN)) == said


def test_several_in_a_form_of_their_own():
    said = did_you_mean("laten", KNOWN, lambda close: f"--{close}", most=2)
    assert said == "Did you mean --late or --latency? "
    assert did_you_mean("laten", KNOWN, most=2, cutoff=0.85) == "Did you mean 'late'? "


@pytest.mark.parametrize(
    ("number", "said"),
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
def test_an_amount_has_four_digits_and_no_leading_zeros(number, said):
    assert amount(number) == said


def test_an_error_in_one_line_without_the_colours_of_a_terminal():
    assert one_line(ValueError("This is \x1b[96mstep 3/3\x1b[0m\n of\texporting")) == "This is step 3/3 of exporting"
    assert one_line(KeyError()) == "KeyError"
    assert len(one_line(ValueError("x" * 400))) == 300
