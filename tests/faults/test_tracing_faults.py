"""Seeded faults in tracing: each one must make a comparison with the model fail."""

import importlib
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import depthfold as df
from depthfold.errors import DepthfoldError
from depthfold.tracing.size_guard import SizeCheck, SizeGuard
from fault_networks import Faults
from nets import Net, agree, conv, image

# These tests check the tests.
pytestmark = pytest.mark.slow

functional, merging, padding, plain, recording = (
    importlib.import_module(f"depthfold.{name}")
    for name in ("tracing.functional", "merging.merge", "rewriting.padding", "merging.cleaning", "tracing.recording")
)


class Same(nn.Conv2d):
    """A convolution with TensorFlow's padding, which depends on the input size."""

    def forward(self, x):
        total = max((math.ceil(x.shape[2] / 2) - 1) * 2 + 3 - x.shape[2], 0)
        return F.conv2d(F.pad(x, (1, 1, total // 2, total - total // 2)), self.weight, self.bias, 2)


def shared(net, x):
    """Run two convolutions with shared weights, which are also read elsewhere."""
    x = F.relu(net.norm(F.conv2d(F.relu(net.a(x)), net.w.weight, padding=1)))
    return net.a2(F.conv2d(x, net.w.weight, padding=1)) + net.w.weight.mean()


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, 3, 3))


def aliased(net, x):
    x = net.a(x)
    kept = x
    out = net.b(F.relu(net.a2(x)))
    x += 1
    return out + kept


def overwritten_in_part(net, x):
    x = net.a(x)
    part = x[:, 1:]
    out = net.b(F.relu(net.a2(x)))
    part += 1
    return out + x


class ChecksType(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = conv()

    def forward(self, x):
        return self.a(x) if type(x) is torch.Tensor else self.a(x) * 2


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.a2 = conv(), conv()
        for name, values in (("mean", torch.randn(4)), ("var", torch.rand(4) + 0.5)):
            self.register_buffer(name, values)

    def forward(self, x):
        return self.a2(F.relu(F.batch_norm(self.a(x), self.mean, self.var, eps=0.1)))


MODELS = {
    "padding by size": lambda: nn.Sequential(conv(), nn.ReLU(), conv(stride=2), nn.ReLU(), Same(4, 4, 3)),
    "shared weights": lambda: Net(shared, a=conv(), a2=conv(), w=Holder(), norm=nn.BatchNorm2d(4, eps=0.5)),
    "two names": lambda: Net(aliased, a=conv(), a2=conv(), b=conv()),
    "a part of a value": lambda: Net(overwritten_in_part, a=conv(), a2=conv(), b=conv()),
    "type": lambda: nn.Sequential(conv(), nn.ReLU(), ChecksType(), conv()),
    "functional norm": Normed,
}


def check():
    """Compare merged networks with the model and the student at several sizes.

    A network may refuse a size, but must not compute something else.
    """
    for seed, build in enumerate(MODELS.values()):
        torch.manual_seed(seed)
        model = build().double().eval()
        traced = df.trace(model, image(16).double())
        vanilla, whole = (
            df.rewrite(traced, plan).eval() for plan in (traced.vanilla, df.Plan((), traced.network.barriers))
        )
        for made, wanted in ((vanilla, model), (df.merge(vanilla), model), (df.merge(whole), whole), (whole, whole)):
            refused = []
            for size in (16, 18, 20, 17):
                x = image(size).double()
                try:
                    with torch.no_grad():
                        found = made(x.clone())
                except (AssertionError, DepthfoldError) as error:
                    assert "depends on the size" in str(error)
                    refused.append(size)
                else:
                    with torch.no_grad():
                        agree(found, wanted(x.clone()))
            assert refused == ([18, 17] if seed == 0 else [])


FAULTS = fault = Faults()


@fault
def size_guards_removed(patch):
    patch.setattr(SizeGuard, "forward", lambda guard, x: x)
    patch.setattr(plain, "_assert_size", lambda *given: None)


@fault
def assertions_of_the_merged_network_removed(patch):
    patch.setattr(plain, "_assert_size", lambda *given: None)


@fault
def guard_not_moved_out_of_its_segment(patch):
    patch.setattr(padding, "_move_guards", lambda *given: None)


@fault
def guard_moved_without_preceding_strides(patch):
    patch.setattr(padding, "SizeCheck", lambda dim, rule, shift, stride: SizeCheck(dim, rule, shift, 1))


@fault
def shared_parameter_folded_away(patch):
    patch.setattr(functional, "_can_replace", lambda *given: True)


@fault
def shared_parameter_dropped(patch):
    cleaning = importlib.import_module("depthfold.merging.cleaning")

    def drop_all(graph):
        for module in graph.modules():
            module._parameters.pop("weight", None) if type(module) is nn.Module else None

    patch.setattr(cleaning, "_drop_unused_tensors", drop_all)


@fault
def in_place_writes_ignored(patch):
    patch.setattr(recording, "redirect_reads", lambda graph, run: frozenset())


@fault
def modified_values_ignored(patch):
    original = recording.redirect_reads
    patch.setattr(recording, "redirect_reads", lambda graph, run: original(graph, run) and frozenset())


@fault
def recording_not_checked(patch):
    patch.setattr(recording, "find_fault", lambda *given: None)


@fault
def statistics_of_a_functional_norm_swapped(patch):
    original = functional.norm_statistics_at
    kernels = importlib.import_module("depthfold.merging.kernels")

    def swapped(graph, node):
        known = original(graph, node)
        return type(known)(known.variance, known.mean.abs(), known.weight, known.bias, known.eps)

    patch.setattr(kernels, "norm_statistics_at", swapped)


def test_check_passes_without_a_fault():
    check()


@pytest.mark.parametrize("name", FAULTS)
def test_check_detects_the_fault(name, monkeypatch):
    FAULTS[name](monkeypatch)
    with pytest.raises((AssertionError, DepthfoldError, AttributeError, NotImplementedError)):
        check()


def test_merge_detects_the_fault(monkeypatch):
    """The verification in merge() detects a shared weight that was folded."""
    shared_parameter_folded_away(monkeypatch)
    torch.manual_seed(0)
    traced = df.trace(MODELS["shared weights"]().double().eval(), image(16).double())
    with pytest.raises((DepthfoldError, NotImplementedError)):
        df.merge(df.rewrite(traced, traced.vanilla))
