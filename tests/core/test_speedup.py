"""Measured speed-ups: which are unreliable, and what is said about them."""

import dataclasses

import pytest

from depthfold.core import MeasuredSpeedup, side_by_side
from depthfold.core.speedup import relative_spread
from runs import measured_run

LOADED = MeasuredSpeedup(original=(2.805, 7.133, 10.79), network=(0.4635, 0.4791, 0.5321))  # as a user found it


def test_speedup_is_the_ratio_of_the_medians():
    quiet = MeasuredSpeedup(original=(9.9, 10.0, 10.2), network=(3.9, 4.0, 4.4))
    assert (quiet.factor, quiet.share, quiet.unreliable) == (2.5, 0.4, None)
    assert str(quiet) == "2.50x as fast"


def test_wide_time_makes_the_speedup_unreliable():
    assert str(LOADED) == "14.89x as fast, unreliable"
    assert LOADED.unreliable == "the original took 2.805 to 10.79 ms; something else was probably running"
    turned = MeasuredSpeedup(original=LOADED.network, network=LOADED.original)
    assert turned.unreliable == "the compressed network took 2.805 to 10.79 ms; something else was probably running"
    both = MeasuredSpeedup(original=LOADED.original, network=(1.0, 2.0, 3.0)).unreliable
    assert both.startswith("the original took 2.805 to 10.79 ms and the compressed network took 1 to 3 ms; ")


@pytest.mark.parametrize(("high", "reliable"), [(1.099, True), (1.101, False)])
def test_widest_range_is_a_fifth_of_the_median(high, reliable):
    found = MeasuredSpeedup(original=(0.9, 1.0, high), network=(1.0, 1.0, 1.0))
    assert (found.unreliable is None) == reliable


def test_time_of_zero_has_no_spread():
    assert relative_spread((0.0, 0.0, 0.0)) == 0.0
    assert MeasuredSpeedup(original=(0.0, 0.0, 0.0), network=(0.0, 0.0, 0.0)).share == 0.0


def test_profiles_side_by_side_name_the_network_that_was_disturbed():
    quiet = measured_run()
    loaded = dataclasses.replace(quiet.before, quartiles=LOADED.original)
    text = side_by_side({"before": loaded, "after": quiet.after})
    assert "unreliable: before took 2.805 to 10.79 ms; something else was probably running. Measure again when" in text
    assert "unreliable" not in side_by_side({"before": quiet.before, "after": quiet.after})
