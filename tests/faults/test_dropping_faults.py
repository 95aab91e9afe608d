"""Seeded faults in plans with dropped layers and branches, detected as in test_faults.py."""

import importlib
from dataclasses import replace

import pytest

from depthfold.algebra import Kernel
from depthfold.core import NOTHING, Drops, Network
from depthfold.errors import DepthfoldError, VerificationError
from fault_networks import DROPPING, NetworkFaults, check, replace_with

# These tests check the tests.
pytestmark = pytest.mark.slow

dropping, padding, merging = (
    importlib.import_module(f"depthfold.{name}")
    for name in ("rewriting.dropping", "rewriting.padding", "merging.merge")
)

FAULTS = fault = NetworkFaults()


@fault("projection")
def crop_computed_without_the_drops(patch):
    replace_with(patch, padding, "skip_crop", lambda crop: lambda *given: crop(*given[:-1], NOTHING))


@fault("projection")
def padding_of_dropped_layers_moved_to_the_front(patch):
    replace_with(
        patch, Network, "path_shape", lambda shape: lambda network, span, dropped=NOTHING: shape(network, span)
    )


@fault("projection")
def batch_norm_of_a_dropped_layer_kept(patch):
    replace_with(
        patch,
        dropping,
        "_drop_layer",
        lambda drop: lambda graph, nodes, site: drop(graph, nodes, replace(site, affine=())),
    )


@fault("residuals")
def padding_of_a_dropped_layer_kept(patch):
    replace_with(
        patch,
        dropping,
        "_drop_layer",
        lambda drop: lambda graph, nodes, site: drop(graph, nodes, replace(site, pad=None)),
    )


@fault("residuals")
def addition_after_a_dropped_branch_kept(patch):
    def wrong(graph, nodes, site):
        nodes[site.add].args = (nodes[site.operand],) * 2
        return nodes[site.add]

    patch.setattr(dropping, "_drop_branch", wrong)


@fault("residuals")
def dropped_branch_kept(patch):
    patch.setattr(dropping, "_drop_branch", lambda graph, nodes, site: nodes[site.add])


@fault("residuals")
def skip_inside_a_dropped_branch_still_added(patch):
    patch.setattr(Drops, "covers", lambda dropped, span: False)


@fault("residuals")
def kernel_overwritten_that_a_skip_reads_later(patch):
    replace_with(patch, Kernel, "plus", lambda plus: lambda kernel, skip, **_: plus(kernel, skip, reuse=True))


@fault("projection")
def zeros_padded_after_the_bias_of_a_projection(patch):
    def wrong(blueprint, span, dropped):
        return next(iter(dropped.kept(span)), None)

    patch.setattr(padding, "front_layer", wrong)


# A fault may cause a wrong value, a DepthfoldError, or tensors that do not fit.
DETECTED = (AssertionError, DepthfoldError, RuntimeError)


def test_check_passes_without_a_fault():
    check(DROPPING)


@pytest.mark.parametrize("name", FAULTS)
def test_check_detects_the_fault(name, monkeypatch):
    network = FAULTS[name](monkeypatch)
    with pytest.raises(DETECTED):
        check(DROPPING, only=network)


@pytest.mark.parametrize("name", FAULTS)
def test_check_detects_the_fault_without_verification(name, monkeypatch):
    verification = importlib.import_module("depthfold.merging.verify").Verification
    monkeypatch.setattr(merging, "verify", lambda *given: verification((), 0.0, 1.0))
    network = FAULTS[name](monkeypatch)
    with pytest.raises(DETECTED) as found:
        check(DROPPING, only=network)
    assert not isinstance(found.value, VerificationError)


@pytest.mark.parametrize("name", FAULTS)
def test_verification_alone_detects_the_fault(name, monkeypatch):
    monkeypatch.setattr("fault_networks.agree", lambda *given: None)
    network = FAULTS[name](monkeypatch)
    with pytest.raises((DepthfoldError, RuntimeError)):
        check(DROPPING, only=network)
