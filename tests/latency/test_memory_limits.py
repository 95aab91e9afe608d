"""How many candidates are compiled at the same time, on a runtime whose memory and threads are counted."""

import dataclasses

import pytest
import torch
from torch import nn

import depthfold as df
from depthfold.backends.cost_model import CostModel
from depthfold.errors import OutOfMemory
from depthfold.latency import candidates, cost, measure_latency
from depthfold.latency.blocks import block_shapes
from latency_workshop import COST, QUICK


class Open:
    """A compiled module that counts until it is closed."""

    def __init__(self, compiled, alive):
        self.compiled, self.alive = compiled, alive
        self.seconds = compiled.seconds
        alive.append(self)

    @property
    def numbers(self):
        module, inputs = self.compiled._module, self.compiled._inputs
        kept = (*module.parameters(), *module.buffers(), inputs[0], self.compiled()[0])
        return sum(tensor.numel() for tensor in kept)

    def close(self):
        self.alive.remove(self)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Counted(CostModel):
    """A runtime for at most `room` modules. It records how many there are and how many elements they have."""

    room: int = 1000
    alive: list = dataclasses.field(default_factory=list)
    most: list = dataclasses.field(default_factory=list)
    refused: list = dataclasses.field(default_factory=list)

    def compile(self, module, inputs):
        if len(self.alive) >= self.room:
            self.refused.append(module)
            raise OutOfMemory(f"only {self.room} fit")
        Open(CostModel.compile(self, module, inputs), self.alive)
        self.most.append((len(self.alive), sum(one.numbers for one in self.alive)))
        return self.alive[-1]


def distinct(traced):
    return set(block_shapes(traced, traced.spans("paper"), 1).values())


@pytest.fixture(scope="module")
def times(traced):
    return measure_latency(traced, COST, mode="alone", timer=QUICK).times


def test_candidates_that_do_not_fit_together_are_compiled_later(traced, times):
    backend = Counted(room=3)
    table = measure_latency(traced, backend, mode="alone", timer=QUICK)
    assert table.times == times
    assert max(count for count, _ in backend.most) == 3
    # After each third module it is full, and the refused one is the first of the next group.
    assert len(backend.refused) == (len(distinct(traced)) - 1) // 3
    assert backend.alive == []


def test_block_that_does_not_fit_alone_has_a_reason_and_is_compiled_once(traced):
    backend = Counted(room=0)
    table = measure_latency(traced, backend, mode="alone", timer=QUICK)
    assert {entry.reason for entry in table.entries} == {"only 0 fit"}
    assert len(backend.refused) == len(distinct(traced))


@pytest.mark.parametrize("limit", [1, 20_000, 10**9])
def test_candidates_at_the_same_time_are_within_the_limit(traced, times, monkeypatch, limit):
    monkeypatch.setattr(candidates, "MAX_ELEMENTS", limit)
    backend = Counted()
    assert measure_latency(traced, backend, mode="alone", timer=QUICK).times == times
    # A candidate that is larger than the limit is compiled alone.
    assert all(count == 1 or numbers <= limit for count, numbers in backend.most)
    most = max(count for count, _ in backend.most)
    assert most == {1: 1, 10**9: len(distinct(traced))}.get(limit, most) and (limit == 1 or most > 1)
    assert backend.alive == []


class ManyThreads(Counted):
    """Each of its modules owns many threads."""

    def environment(self, inputs):
        return dataclasses.replace(COST.environment(inputs), threads=200)


def test_candidates_at_the_same_time_have_a_limited_number_of_threads(traced, times):
    """The system may refuse to start thousands of them, and ONNX Runtime then hangs."""
    backend = ManyThreads()
    assert measure_latency(traced, backend, mode="alone", timer=QUICK).times == times
    assert max(count for count, _ in backend.most) == candidates.MAX_THREADS // 200 > 1
    assert backend.alive == []


class Headed(nn.Module):
    """Layers with 2,000 elements, and a stem, a head and a buffer with 130,000."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 31, padding=15)
        self.body = nn.Sequential(*(part for _ in range(4) for part in (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())))
        self.head = nn.Linear(8 * 16 * 16, 40)
        self.register_buffer("basis", torch.zeros(8 * 16 * 16, 12))

    def forward(self, x):
        features = self.body(self.stem(x)).flatten(1)
        return self.head(features), features @ self.basis


@pytest.mark.parametrize(("limit", "together"), [(265_000, 1), (450_000, 3)])
def test_size_of_a_network_includes_stem_head_and_buffers(monkeypatch, limit, together):
    traced = df.trace(Headed(), torch.randn(2, 3, 16, 16), ignore=["stem"])
    monkeypatch.setattr(candidates, "MAX_ELEMENTS", limit)
    backend = Counted()
    measure_latency(traced, backend, timer=QUICK, networks=8)
    wholes = [(count, numbers) for count, numbers in backend.most if numbers > 130_000]
    assert len(wholes) >= 5 and all(numbers <= limit for _, numbers in wholes)
    assert max(count for count, _ in wholes) == together
    assert backend.alive == []


def test_limit_is_two_gigabytes():
    assert pytest.approx(2e9, rel=0.1) == cost.BYTES_KEPT * candidates.MAX_ELEMENTS
