"""The progress of a measurement."""

import dataclasses

from depthfold.backends.cost_model import CostModel
from depthfold.errors import BackendError
from depthfold.latency import Timer, measure_latency
from depthfold.latency.blocks import block_shapes
from depthfold.latency.candidates import RoundCounter
from latency_workshop import COST, QUICK


class Watcher:
    """A progress that records (total, done) after every announcement and every round."""

    def __init__(self):
        self.states = {}

    def __call__(self, what, total, done):
        states = self.states.setdefault(what, [])
        states.append((total, done))

        def step():
            states.append((states[-1][0], states[-1][1] + 1))

        return step


def test_counter_follows_added_rounds_and_failures():
    watcher = Watcher()
    counter = RoundCounter("blocks", watcher, 3, {"a": 2, "b": 2})
    counter.step("a", 1)
    counter.step("a", 1)  # its spread is too large: one more round, and the bar is not full before it
    counter.fail("b")
    counter.step("a", 0)
    assert watcher.states["blocks"] == [(7, 3), (7, 4), (8, 4), (8, 5), (6, 5), (6, 6)]


def test_counter_drops_rounds_that_are_not_needed():
    watcher = Watcher()
    counter = RoundCounter("blocks", watcher, 0, {"a": 5})
    counter.step("a", 0)
    assert watcher.states["blocks"] == [(5, 0), (1, 0), (1, 1)]


def states_of(traced, backend, timer):
    watcher = Watcher()
    measure_latency(traced, backend, mode="alone", timer=timer, progress=watcher)
    return watcher.states["blocks"]


def test_bar_is_full_after_the_last_round_and_not_before(traced):
    noisy = CostModel(noise=0.5, seed=1)
    timer = Timer(warmup=0.0, round_seconds=0.0, samples=2, rounds=2, extra=4, spread=0.4)
    states = states_of(traced, noisy, timer)
    assert states[-1][0] == states[-1][1] > states[0][0]
    assert all(done < total for total, done in states[:-1])


def test_total_stays_the_same_without_large_spreads_and_failures(traced):
    states = states_of(traced, COST, QUICK)
    assert {total for total, _ in states} == {states[0][0]} and states[-1] == (states[0][0], states[0][0])


def test_compiling_has_a_bar_before_the_first_round(traced):
    events = []

    def progress(what, total, done):
        return lambda: events.append((what, total))

    @dataclasses.dataclass(frozen=True, slots=True)
    class Recording(CostModel):
        def compile(self, module, inputs):
            events.append("compiled")
            return CostModel.compile(self, module, inputs)

    measure_latency(traced, Recording(), mode="alone", timer=QUICK, progress=progress)
    distinct = events.count("compiled")
    assert distinct == len(set(block_shapes(traced, traced.spans("paper")).values()))
    assert events[: 2 * distinct] == ["compiled", ("compiling blocks", distinct)] * distinct
    assert events[2 * distinct :] == [("blocks", QUICK.rounds * distinct)] * QUICK.rounds * distinct


def test_compiling_bar_leaves_out_known_and_rejected_blocks(traced, tmp_path):
    class Picky(CostModel):
        def compile(self, module, inputs):
            if any(getattr(part, "kernel_size", (1,))[0] >= 5 for part in module.modules()):
                raise BackendError("too large")
            return CostModel.compile(self, module, inputs)

    first, second = Watcher(), Watcher()
    for watcher in (first, second):
        given = dict(mode="alone", timer=QUICK, run=tmp_path)
        measure_latency(traced, Picky(), progress=watcher, **given)
    states = first.states["compiling blocks"]
    assert states[-1][0] == states[-1][1] < states[0][0]
    assert set(second.states) == {"blocks"}


def test_bar_leaves_out_rejected_blocks(traced):
    class Picky(CostModel):
        def compile(self, module, inputs):
            if any(getattr(part, "kernel_size", (1,))[0] >= 5 for part in module.modules()):
                raise BackendError("too large")
            return CostModel.compile(self, module, inputs)

    states = states_of(traced, Picky(), QUICK)
    assert states[-1][0] == states[-1][1] < states[0][0]
