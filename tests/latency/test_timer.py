"""The timer, on candidates with scripted times. No test depends on a clock."""

from itertools import count, cycle

import pytest

from depthfold.errors import InvalidValue
from depthfold.latency.timer import Timer, spread

QUICK = Timer(warmup=0.0, round_seconds=0.0, samples=3, rounds=4, extra=3, spread=0.1)


class Scripted:
    """A candidate that cycles through the given milliseconds and logs its runs."""

    def __init__(self, name, log, *milliseconds):
        self.name, self.log, self.times = name, log, cycle(milliseconds)

    def seconds(self):
        self.log.append(self.name)
        return next(self.times) / 1000


def test_candidates_are_measured_in_rounds():
    log, known = [], {}
    QUICK.measure({name: Scripted(name, log, 1.0) for name in "abc"}, known)
    assert log == ["a"] * 3 + ["b"] * 3 + ["c"] * 3 + (["a"] * 3 + ["b"] * 3 + ["c"] * 3) * 3
    assert {name: sum(map(len, rounds)) for name, rounds in known.items()} == dict.fromkeys("abc", 12)
    assert known["a"][0] == pytest.approx((1.0, 1.0, 1.0))


def test_large_spread_gets_a_limited_number_of_extra_rounds():
    log, known = [], {}
    QUICK.measure({"calm": Scripted("calm", log, 1.0, 1.01), "wild": Scripted("wild", log, 1.0, 2.0, 4.0)}, known)
    assert (len(known["calm"]), len(known["wild"])) == (4, 7)
    assert QUICK.is_done(known["wild"]) and not QUICK.is_done(known["wild"][:6])


def test_computed_times_do_not_depend_on_the_clock(monkeypatch):
    clock = count(0.0, 1.0)  # a stalled machine: each look at the clock is a second later
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    timer = Timer(warmup=0.0, round_seconds=0.03, samples=2)
    measured, computed = Scripted("a", [], 1.0), Scripted("b", [], 1.0)
    computed.computed = True
    assert (len(timer.run_once(measured)), len(timer.run_once(computed))) == (2, 30)
    nothing = Scripted("c", [], 0.0)
    nothing.computed = True
    assert len(timer.run_once(nothing)) == 30_000


def test_known_rounds_are_not_repeated():
    log, added = [], []
    known = {"a": [(1.0, 1.0, 1.0)] * 3}
    candidates = {name: Scripted(name, log, 1.0) for name in "ab"}
    QUICK.measure(candidates, known, lambda key, samples: added.append((key, len(samples))))
    assert added == [("b", 3)] * 3 + [("a", 3), ("b", 3)]


def test_warm_up_ends_when_the_times_are_steady():
    log = []
    falling = Scripted("a", log, *[8.0] * 5, *[4.0] * 5, *[2.0] * 5, *[2.0] * 50)
    Timer(warmup=1e6, window=5, steady=0.05).warm_up(falling)
    assert len(log) == 20  # 8, 4, 2, and 2 again


def test_each_candidate_is_warmed_up_once():
    log, known = [], {}
    candidates = {name: Scripted(name, log, *[9.0] * 5, *[3.0] * 5, *[1.0] * 500) for name in "ab"}
    Timer(warmup=1e6, window=5, round_seconds=0.0, samples=2, rounds=3).measure(candidates, known)
    assert known == {name: [(pytest.approx(1.0),) * 2] * 3 for name in "ab"}
    assert log == ["a"] * 22 + ["b"] * 22 + ["a"] * 2 + ["b"] * 2 + ["a"] * 2 + ["b"] * 2


def test_spread_is_the_interquartile_range_over_the_median():
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2.0 / 3.0)
    assert spread([1.0]) == float("inf")


def test_timer_without_rounds_is_refused():
    with pytest.raises(InvalidValue, match="at least one round, one sample and one run per window"):
        Timer(rounds=0)
