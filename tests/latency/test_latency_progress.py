"""What is said of how far a measurement is."""

import dataclasses
import io
import re
import sys

import rich.console

from depthfold.backends.cost_model import CostModel
from depthfold.errors import BackendError
from depthfold.latency import Timer, measure_latency, progress_bars
from depthfold.latency.blocks import block_shapes
from depthfold.latency.candidates import RoundCounter
from latency_workshop import COST, QUICK


class Watcher:
    """A progress that keeps what it is told: by thing, (total, done) after every announcement and every turn."""

    def __init__(self):
        self.told = {}

    def __call__(self, what, total, done):
        states = self.told.setdefault(what, [])
        states.append((total, done))

        def step():
            states.append((states[-1][0], states[-1][1] + 1))

        return step


def test_turns_that_are_added_and_turns_that_fail_are_counted():
    watcher = Watcher()
    counter = RoundCounter("blocks", watcher, 3, {"a": 2, "b": 2})
    counter.step("a", 1)
    counter.step("a", 1)  # its spread is too large: one more round, and the bar is not full before it
    counter.fail("b")
    counter.step("a", 0)
    assert watcher.told["blocks"] == [(7, 3), (7, 4), (8, 4), (8, 5), (6, 5), (6, 6)]


def test_a_candidate_that_is_known_well_enough_before_its_time_is_counted_as_done():
    watcher = Watcher()
    counter = RoundCounter("blocks", watcher, 0, {"a": 5})
    counter.step("a", 0)
    assert watcher.told["blocks"] == [(5, 0), (1, 0), (1, 1)]


def states_of(traced, backend, timer):
    watcher = Watcher()
    measure_latency(traced, backend, mode="alone", timer=timer, progress=watcher)
    return watcher.told["blocks"]


def test_the_bar_is_full_when_the_last_turn_was_taken_and_not_before(traced):
    noisy = CostModel(noise=0.5, seed=1)
    timer = Timer(warmup=0.0, round_seconds=0.0, samples=2, rounds=2, extra=4, spread=0.4)
    states = states_of(traced, noisy, timer)
    assert states[-1][0] == states[-1][1] > states[0][0]
    assert all(done < total for total, done in states[:-1])


def test_without_wide_spreads_or_failures_the_total_is_announced_once(traced):
    states = states_of(traced, COST, QUICK)
    assert {total for total, _ in states} == {states[0][0]} and states[-1] == (states[0][0], states[0][0])


def test_compiling_is_told_of_before_the_first_turn(traced):
    """Whoever watches sees every block that is compiled; known ones are not compiled, and so there is no such bar."""
    told = []

    def progress(what, total, done):
        return lambda: told.append((what, total))

    @dataclasses.dataclass(frozen=True, slots=True)
    class Told(CostModel):
        def compile(self, module, inputs):
            told.append("compiled")
            return CostModel.compile(self, module, inputs)

    measure_latency(traced, Told(), mode="alone", timer=QUICK, progress=progress)
    distinct = told.count("compiled")
    assert distinct == len(set(block_shapes(traced, traced.spans("paper")).values()))
    assert told[: 2 * distinct] == ["compiled", ("compiling blocks", distinct)] * distinct
    assert told[2 * distinct :] == [("blocks", QUICK.rounds * distinct)] * QUICK.rounds * distinct


def test_what_is_known_is_not_compiled_and_what_is_rejected_is_not_waited_for(traced, tmp_path):
    class Picky(CostModel):
        def compile(self, module, inputs):
            if any(getattr(part, "kernel_size", (1,))[0] >= 5 for part in module.modules()):
                raise BackendError("too large")
            return CostModel.compile(self, module, inputs)

    first, second = Watcher(), Watcher()
    for watcher in (first, second):
        given = dict(mode="alone", timer=QUICK, run=tmp_path)
        measure_latency(traced, Picky(), progress=watcher, **given)
    states = first.told["compiling blocks"]
    assert states[-1][0] == states[-1][1] < states[0][0]
    assert set(second.told) == {"blocks"}


def test_what_the_runtime_rejects_is_no_longer_waited_for(traced):
    class Picky(CostModel):
        def compile(self, module, inputs):
            if any(getattr(part, "kernel_size", (1,))[0] >= 5 for part in module.modules()):
                raise BackendError("too large")
            return CostModel.compile(self, module, inputs)

    states = states_of(traced, Picky(), QUICK)
    assert states[-1][0] == states[-1][1] < states[0][0]


def test_bars_grow_while_they_are_under_way_and_start_anew_afterwards(monkeypatch):
    screen = io.StringIO()
    real = rich.console.Console
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(rich.console, "Console", lambda stderr: real(file=screen, force_terminal=True, width=100))
    with progress_bars() as progress:
        progress("blocks", 2, 1)
        progress("blocks", 3, 1)()
        step = progress("blocks", 4, 2)
        step()
        step()
        progress("blocks", 7, 0)()
    last_frame = screen.getvalue().rpartition("\x1b[2K")[2]
    assert re.findall(r"\d+/\d+", last_frame) == ["4/4", "1/7"]
