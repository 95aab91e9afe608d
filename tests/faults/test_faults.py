"""Seeded faults: each one, injected into the implementation, must make a comparison fail.

The comparison uses tests/reference.py, which shares no code with the implementation. It runs with and without the
verification in merge(), so that both must detect the faults independently.
"""

import importlib
from dataclasses import replace

import pytest
import torch

from depthfold.algebra import Kernel, compose
from depthfold.core import ConvShape
from depthfold.errors import DepthfoldError, VerificationError
from fault_networks import NETWORKS, NetworkFaults, check, replace_with

# These tests check the tests.
pytestmark = pytest.mark.slow

# Modules by name, because some have the same name as a function in their package.
chains, layers, numbering, pooling, shapes, padding, activations, rewriting, kernels, cleaning, merging = (
    importlib.import_module(f"depthfold.{name}")
    for name in (
        "tracing.chains",
        "tracing.layers",
        "tracing.numbering",
        "tracing.shapes",
        "tracing.shapes",
        "rewriting.padding",
        "rewriting.activations",
        "rewriting.rewrite",
        "merging.kernels",
        "merging.cleaning",
        "merging.merge",
    )
)


FAULTS = fault = NetworkFaults()


@fault("strides")
def eps_fixed(patch):
    for owner in (kernels, cleaning):
        replace_with(patch, owner, "fold_norm", lambda fold: lambda kernel, norm: fold(kernel, replace(norm, eps=1e-5)))


@fault("strides")
def mean_of_the_norm_ignored(patch):
    for owner in (kernels, cleaning):
        replace_with(
            patch,
            owner,
            "fold_norm",
            lambda fold: lambda kernel, norm: fold(kernel, replace(norm, mean=torch.zeros_like(norm.mean))),
        )


@fault("strides")
def padding_not_moved(patch):
    patch.setattr(rewriting, "move_padding", lambda *given: None)


@fault("strides")
def padding_moved_without_the_strides_before_it(patch):
    def wrong(then):
        def composed(one, two):
            plain = tuple((a + c, b + d) for (a, b), (c, d) in zip(one.padding, two.padding, strict=True))
            return replace(then(one, two), padding=plain)

        return composed

    replace_with(patch, ConvShape, "then", wrong)


@fault("strides")
def stride_ignored_in_the_composition(patch):
    def wrong(then):
        def composed(one, two):
            ones = (1,) * one.dims
            return replace(then(replace(one, stride=ones), two), stride=then(one, two).stride)

        return composed

    replace_with(patch, ConvShape, "then", wrong)


@fault("strides")
def stride_ignored_in_the_weights_alone(patch):
    def wrong(original):
        def composed(first, one, second, two):
            wanted = original(first, one, second, two)
            narrow = original(first, replace(one, stride=(1,) * one.dims), second, two)
            out = torch.zeros_like(wanted)
            out[tuple(slice(0, n) for n in narrow.shape)] = narrow
            return out

        return composed

    replace_with(patch, importlib.import_module("depthfold.algebra.kernel"), "compose_weights", wrong)


@fault("strides")
def kernel_flipped(patch):
    replace_with(
        patch,
        importlib.import_module("depthfold.algebra.kernel"),
        "compose_weights",
        lambda original: lambda first, one, second, two: original(first, one, second.flip(2, 3), two),
    )


@fault("strides")
def bias_not_pushed_through_the_next_kernel(patch):
    replace_with(patch, Kernel, "then", lambda then: lambda one, two: replace(then(one, two), bias=two.bias))


@fault("strides")
def bias_pushed_through_one_tap_only(patch):
    def wrong(then):
        def composed(one, two):
            centre = replace(two, weight=two.weight.clone())
            middle = tuple(k // 2 for k in two.shape.kernel)
            keep = centre.weight[(..., *middle)].clone()
            centre.weight.zero_()
            centre.weight[(..., *middle)] = keep
            return replace(then(one, two), bias=then(one, centre).bias)

        return composed

    replace_with(patch, Kernel, "then", wrong)


@fault("groups")
def channels_mixed_when_groups_are_joined(patch):
    def wrong(original):
        def regrouped(weight, groups, fewer):
            out = original(weight, groups, fewer)
            return out if groups == fewer else out.flip(1)

        return regrouped

    replace_with(patch, compose, "regroup", wrong)


@fault("groups")
def subgroups_in_the_wrong_order(patch):
    def wrong(original):
        return lambda out, merged: out.reshape(merged.out_channels, merged.in_channels // merged.groups, *merged.kernel)

    replace_with(patch, compose, "_ungroup", wrong)


@fault("groups")
def groups_lost(patch):
    replace_with(patch, ConvShape, "then", lambda then: lambda one, two: replace(then(one, two), groups=1))


@fault("residual")
def skip_not_folded(patch):
    patch.setattr(Kernel, "plus", lambda kernel, skip, **_: kernel)


@fault("residual")
def skip_folded_next_to_the_centre(patch):
    def wrong(plus):
        def added(kernel, skip, **_):
            moved = replace(skip, weight=skip.weight)
            whole = plus(kernel, moved)
            shifted = torch.roll(whole.weight - kernel_of(kernel, whole), 1, dims=-1)
            return replace(whole, weight=kernel_of(kernel, whole) + shifted)

        def kernel_of(kernel, whole):
            zero = ConvShape.identity(kernel.shape.in_channels, kernel.shape.dims)
            if kernel.shape.offset(zero) is None:
                return torch.zeros_like(whole.weight)
            nothing = Kernel(zero, kernel.weight.new_zeros((zero.in_channels, 1, 1, 1)), torch.zeros_like(kernel.bias))
            return plus(kernel, nothing).weight

        return added

    replace_with(patch, Kernel, "plus", wrong)


@fault("projection")
def skip_not_cropped(patch):
    patch.setattr(padding, "_crop_skip", lambda *given: None)


@fault("residual")
def skip_cropped_at_one_side(patch):
    replace_with(
        patch,
        padding,
        "skip_crop",
        lambda crop: lambda *given: tuple((a + 1, b - 1) for a, b in crop(*given)),
    )


@fault("dilations")
def dilation_ignored(patch):
    patch.setattr(compose, "spread", lambda weight, dilation, grid: weight)


@fault("dilations")
def dilation_of_the_second_ignored(patch):
    def wrong(then):
        def composed(one, two):
            ones = (1,) * one.dims
            return then(one, replace(two, dilation=ones))

        return composed

    replace_with(patch, ConvShape, "then", wrong)


@fault("projection")
def norm_of_the_projection_ignored(patch):
    replace_with(patch, numbering, "StepSite", lambda site: lambda **given: site(**given | {"affine": ()}))


@fault("branches")
def branch_inside_a_sum_lost(patch):
    def wrong(original):
        return lambda *given: (site for site in original(*given) if not site.sums)

    replace_with(patch, numbering, "_skip_sites", wrong)


@fault("branches")
def second_step_of_a_branch_ignored(patch):
    patch.setattr(kernels, "reduce", lambda compose, steps: next(iter(steps)))


@fault("branches")
def pool_divides_by_its_width(patch):
    patch.setattr(pooling.AveragePool, "divisor", property(lambda pool: pool.kernel[-1]))


@fault("branches")
def padding_of_a_pool_not_moved(patch):
    patch.setattr(padding, "_remove_pool_padding", lambda *given: None)


@fault("branches")
def identity_inside_a_sum_not_cropped(patch):
    def wrong(original):
        def entry(graph, nodes, site):
            return original(graph, nodes, site if site.steps else replace(site, sums=()))

        return entry

    replace_with(patch, padding, "_entry", wrong)


@fault("residual")
def activation_inserted_before_the_addition(patch):
    def wrong(insert):
        def inserted(graph, nodes, traced, l):
            sites = tuple(replace(site, out=site.linear) for site in traced.blueprint.sites)
            insert(graph, nodes, replace(traced, blueprint=replace(traced.blueprint, sites=sites)), l)

        return inserted

    replace_with(patch, rewriting, "insert_activation", wrong)


@fault("residual")
def activation_not_inserted(patch):
    patch.setattr(rewriting, "insert_activation", lambda *given: None)


@fault("strides")
def activation_not_removed(patch):
    patch.setattr(rewriting, "remove_activation", lambda *given: None)


@fault("same")
def odd_padding_of_same_in_front(patch):
    def wrong(original):
        return lambda layer: tuple((b, a) if layer.padding == "same" else (a, b) for a, b in original(layer))

    for owner in (shapes, cleaning):
        replace_with(patch, owner, "module_padding", wrong)


@fault("strides")
def padding_before_a_layer_ignored(patch):
    replace_with(patch, shapes, "pad_widths", lambda original: lambda node, modules, dims: ((0, 0),) * dims)


@fault("strides")
def sides_of_the_padding_swapped(patch):
    replace_with(
        patch,
        shapes,
        "pad_widths",
        lambda original: lambda *given: tuple((b, a) for a, b in original(*given)),
    )


def test_check_passes_without_a_fault():
    check()


# A fault may cause a wrong value, a DepthfoldError, or tensors that do not fit.
DETECTED = (AssertionError, DepthfoldError, RuntimeError, IndexError)


@pytest.mark.parametrize("name", FAULTS)
def test_check_detects_the_fault(name, monkeypatch):
    network = FAULTS[name](monkeypatch)
    with pytest.raises(DETECTED):
        check(NETWORKS, only=network)


@pytest.fixture
def unverified(monkeypatch):
    """Turn off the verification in merge()."""
    verification = importlib.import_module("depthfold.merging.verify").Verification
    monkeypatch.setattr(merging, "verify", lambda *given: verification((), 0.0, 1.0))


@pytest.mark.usefixtures("unverified")
def test_check_passes_without_a_fault_and_without_verification():
    check()


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize("name", FAULTS)
def test_check_detects_the_fault_without_verification(name, monkeypatch):
    network = FAULTS[name](monkeypatch)
    with pytest.raises(DETECTED) as found:
        check(NETWORKS, only=network)
    assert not isinstance(found.value, VerificationError)


# Faults in both the student and the merged network, which verification cannot detect, because it compares the two.
IN_BOTH = {
    "activation not inserted",
    "odd padding of same in front",
    "padding moved without the strides before it",
    "sides of the padding swapped",
}


@pytest.mark.parametrize("name", sorted(set(FAULTS) - IN_BOTH))
def test_verification_alone_detects_every_other_fault(name, monkeypatch):
    monkeypatch.setattr("fault_networks.agree", lambda *given: None)
    network = FAULTS[name](monkeypatch)
    with pytest.raises((DepthfoldError, RuntimeError)):
        check(NETWORKS, only=network)
