"""How names that are nearly right are put into sentences."""

import pytest

from depthfold.core.wording import did_you_mean

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
