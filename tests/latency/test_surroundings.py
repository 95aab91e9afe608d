"""Latencies depend on the operations around the layers, so journals record them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import depthfold as df
from depthfold.errors import JournalError
from depthfold.latency import measure_latency
from depthfold.latency.journal import latency_depends_on
from depthfold.pipeline import Options
from depthfold.pipeline.artefacts import make_latency_table
from depthfold.store import RunFolder
from latency_workshop import COST, QUICK


class Framed(nn.Module):
    """Three layers between an ignored stem and a head, with an added constant."""

    def __init__(self, *, stem=1, power=1.0, pool=1, constant=(1,), middle="middle"):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, stem, padding=stem // 2)
        self.add_module(middle, nn.Sequential(*(m for _ in range(3) for m in (nn.Conv2d(4, 4, 3), nn.ReLU()))))
        self.called, self.power, self.pool = middle, power, nn.AdaptiveAvgPool2d(pool)
        self.register_buffer("constant", torch.zeros(constant))

    def forward(self, x):
        x = self.get_submodule(self.called)(self.stem(x))
        return F.softplus(self.pool(x).flatten(1) + self.constant, beta=self.power)


def traced(**differences):
    torch.manual_seed(0)
    return df.trace(Framed(**differences), torch.randn(1, 3, 32, 32), ignore=["stem"])


@pytest.mark.parametrize("difference", [{"stem": 15}, {"power": 2.0}, {"pool": 2}, {"constant": (4,)}])
def test_journal_of_a_network_with_other_surroundings_is_refused(difference, tmp_path):
    one, other = traced(), traced(**difference)
    assert one.network.fingerprint == other.network.fingerprint and one.surroundings_digest != other.surroundings_digest
    measure_latency(one, COST, timer=QUICK, networks=4, run=tmp_path)
    with pytest.raises(JournalError, match=r"around the layers \(stem, head, pooling\): \w+ there, \w+ here"):
        measure_latency(other, COST, timer=QUICK, networks=4, run=tmp_path)


def test_names_and_weights_do_not_matter():
    torch.manual_seed(1)
    other = df.trace(Framed(middle="trunk"), torch.randn(1, 3, 32, 32), ignore=["stem"])
    assert other.surroundings_digest == traced().surroundings_digest


def test_finished_table_of_another_network_is_not_reused(tmp_path):
    run = RunFolder.open(tmp_path / "run")
    table = make_latency_table(run, traced(), COST, Options(), no_progress)
    assert make_latency_table(run, traced(), COST, Options(), no_progress) == table
    with pytest.raises(JournalError, match="operations around the layers"):
        make_latency_table(run, traced(stem=15), COST, Options(), no_progress)


class Guided(nn.Module):
    """Two layers, and a second input that goes past them. Its size changes no other part of the network."""

    def __init__(self):
        super().__init__()
        self.body, self.guide = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)), nn.Conv2d(1, 4, 3)

    def forward(self, x, guide):
        return self.body(x).mean((2, 3)) + F.softplus(self.guide(guide)).mean((2, 3))


def guided(size):
    torch.manual_seed(0)
    return df.trace(Guided(), (torch.randn(1, 3, 16, 16), torch.randn(1, 1, size, size)), ignore=["guide"])


def test_journal_of_another_size_of_the_second_input_is_refused(tmp_path):
    one, other = guided(8), guided(32)
    assert one.network.fingerprint == other.network.fingerprint and one.surroundings_digest == other.surroundings_digest
    run = RunFolder.open(tmp_path / "run")
    table = make_latency_table(run, one, COST, Options(), no_progress)
    assert make_latency_table(run, guided(8), COST, Options(), no_progress) == table
    message = r"sizes of the inputs: 1x3x16x16, 1x1x8x8 there, 1x3x16x16, 1x1x32x32 here"
    with pytest.raises(JournalError, match=message):
        measure_latency(other, COST, timer=QUICK, networks=4, run=run.path)
    with pytest.raises(JournalError, match=message):
        make_latency_table(run, other, COST, Options(), no_progress)


def test_journal_of_a_network_with_one_input_stays_valid():
    """The environment has the size of the first input, so the headers of such journals do not repeat it."""
    network = traced()
    names = latency_depends_on(network, COST.environment(network.example_tensors())).keys()
    assert names == {"network", "operations around the layers (stem, head, pooling)", "environment"}


def no_progress(what, total, done=0):
    return lambda: None
