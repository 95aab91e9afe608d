"""Blocks that wait when they run alone but not inside a network: for example, a GPU waits for launches."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from depthfold.backends.cost_model import CostModel
from depthfold.backends.inductor import Inductor
from depthfold.backends.pytorch import PyTorch
from depthfold.errors import InvalidValue
from depthfold.latency import measure_latency
from depthfold.latency.blocks import block_module
from depthfold.latency.samples import plans_of_all_depths
from depthfold.merging import sketch
from depthfold.rewriting import rewrite
from latency_workshop import QUICK, block_shape

LEAST = 60e-6  # seconds: more than a short block takes, less than any whole network


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting(CostModel):
    """A runtime on which no call takes less than LEAST, as if kernels were shorter than their launches."""

    name: ClassVar[str] = "waiting"
    waits: bool = True

    def compile(self, module, inputs):
        compiled = CostModel.compile(self, module, inputs)
        return _Slow(compiled) if self.waits else compiled

    def inside(self):
        return replace(self, waits=False)


class _Slow:
    def __init__(self, compiled):
        self._compiled = compiled
        self.close = compiled.close

    def __call__(self):
        return self._compiled()

    def seconds(self):
        return max(LEAST, self._compiled.seconds())


WAITING = Waiting(network_us=0.0)


def measured_ms(traced, plan):
    return 1e3 * WAITING.compile(sketch(rewrite(traced, plan)), traced.example_tensors()).seconds()


def worst(traced, table):
    """Return the worst error of the table over plans that it has not seen."""
    errors = []
    for plan in plans_of_all_depths(traced.network, traced.spans("paper"), 12, seed=5):
        errors.append(abs(table.predict(traced.network, plan) / measured_ms(traced, plan) - 1))
    return max(errors)


def test_blocks_in_context_are_timed_as_they_run_inside_a_network(traced, tmp_path):
    """Both modes share one journal, but not their times."""
    alone = measure_latency(traced, WAITING, mode="alone", run=tmp_path, timer=QUICK)
    inside = measure_latency(traced, WAITING, run=tmp_path, timer=QUICK, networks=12)
    again = measure_latency(traced, WAITING, mode="alone", run=tmp_path, timer=QUICK)
    assert alone.entries == again.entries
    medians = {entry.span: entry.quartiles[1] for entry in inside.entries}
    for entry in alone.entries:
        computed = CostModel.compile(WAITING, *block_of(traced, entry.span)).seconds()
        assert entry.quartiles[1] == pytest.approx(1e3 * max(LEAST, computed))
        assert medians[entry.span] == pytest.approx(1e3 * computed)
    assert min(medians.values()) < 1e3 * LEAST < measured_ms(traced, traced.vanilla)
    assert worst(traced, inside) < 1e-3


def block_of(traced, span):
    block = block_shape(traced, span)
    return block_module(traced, block), block.inputs()


@pytest.mark.parametrize("backend", [PyTorch(), Inductor(), Inductor(mode="reduce-overhead")])
def test_inside_changes_nothing_on_a_cpu(backend):
    assert backend.inside() == backend


@pytest.mark.parametrize(
    ("backend", "inside"),
    [
        (PyTorch(device="cuda", precision="tf32"), PyTorch(device="cuda", precision="tf32", cuda_graphs=True)),
        (Inductor(device="cuda", threads=2), Inductor(device="cuda", threads=2, cuda_graphs=True)),
        (Inductor(device="cuda", mode="reduce-overhead"), Inductor(device="cuda", mode="reduce-overhead")),
    ],
)
def test_inside_uses_cuda_graphs_on_a_gpu(backend, inside):
    assert backend.inside() == inside


def test_cuda_graphs_are_refused_where_they_cannot_be_used():
    with pytest.raises(InvalidValue, match="already uses CUDA graphs"):
        Inductor(device="cuda", mode="reduce-overhead", cuda_graphs=True)
    with pytest.raises(InvalidValue, match="need a CUDA device"):
        Inductor(cuda_graphs=True)
