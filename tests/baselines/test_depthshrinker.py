"""DepthShrinker's patterns: the blocks that they remove, and the networks that they fit."""

from dataclasses import replace
from math import prod

import pytest
import torch

import depthfold as df
from depthfold.baselines import COSTS, PATTERNS, depthshrinker_plan, inverted_residuals, plan_without
from depthfold.errors import InvalidValue, PlanError
from depthfold.vision import import_timm, import_torchvision
from structures import Builder, mobilenet_v2, plain_chain, resnet34

# The number of blocks that each pattern keeps, as published.
KEPT = {
    "DS-A-1.0": 12, "DS-B-1.0": 12, "DS-C-1.0": 9, "DS-D-1.0": 7,
    "DS-A-1.4": 11, "DS-B-1.4": 8, "DS-C-1.4": 8, "DS-D-1.4": 6, "DS-E-1.4": 6, "DS-F-1.4": 0,
}  # fmt: skip
# Millions of multiply-adds at 224x224 of MobileNetV2 (None) and its patterns. The paper counts those of width 1.0, with
# the batch norms of stem and head; DepthShrinker those of width 1.4, with all batch norms that are left.
FLOPS_OF_PAPER = {None: 302, "DS-A-1.0": 315, "DS-B-1.0": 258, "DS-C-1.0": 248, "DS-D-1.0": 243}
FLOPS_OF_DEPTHSHRINKER = {
    None: 630, "DS-A-1.4": 519, "DS-B-1.4": 502, "DS-C-1.4": 492, "DS-D-1.4": 484, "DS-E-1.4": 474, "DS-F-1.4": 415,
}  # fmt: skip


def test_number_of_kept_blocks_is_the_published_one():
    assert {name: 17 - len(set(removed)) for name, removed in PATTERNS.items()} == KEPT


@pytest.mark.parametrize("name", PATTERNS)
def test_removed_blocks_become_one_convolution_with_an_activation(name):
    """In the paper's numbering, block b ends at position 2 + 3b."""
    network = mobilenet_v2()
    plan = depthshrinker_plan(network, name)
    for b in range(17):
        start, end = max(3 * b - 1, 0), 2 + 3 * b
        inside, removed = set(range(start + 1, end)), b in PATTERNS[name]
        assert inside.isdisjoint(plan.cuts) == inside.isdisjoint(plan.activations) == removed
        assert (end in plan.activations) == removed
        assert end in plan.cuts or end == 50
        if removed:
            assert network.merged_shape(df.Span(start, end)).groups == 1
    assert len(network.segments(plan)) == 50 - sum(1 if b == 0 else 2 for b in PATTERNS[name])


def multiply_adds(network, plan):
    """Return the multiply-adds of all layers, and the number of values that single layers compute."""
    total, values = 0, 0
    for span in network.segments(plan):
        shape, pixels = network.merged_shape(span), prod(network.layers[span.j - 1].out_size)
        total += shape.out_channels * shape.in_channels // shape.groups * prod(shape.kernel) * pixels
        values += shape.out_channels * pixels if len(span) == 1 else 0
    return total, values


@pytest.mark.parametrize("name", FLOPS_OF_PAPER)
def test_multiply_adds_are_those_of_the_paper(name):
    network = mobilenet_v2(size=112)
    total, _ = multiply_adds(network, depthshrinker_plan(network, name) if name else network.vanilla)
    total += 112 * 112 * 32 * 27 + 7 * 7 * 320 * 1280 + 1280 * 1000  # stem, last convolution, classifier
    assert 0.8 < FLOPS_OF_PAPER[name] - total / 1e6 < 1.8


@pytest.mark.parametrize("name", FLOPS_OF_DEPTHSHRINKER)
def test_multiply_adds_are_those_of_depthshrinker(name):
    """It does not merge the first block. A batch norm and its activation add about 5 operations per value."""
    network = mobilenet_v2(1.4, size=112)
    blocks = inverted_residuals(network)
    plan = plan_without(network, [blocks[b] for b in PATTERNS.get(name, ()) if b > 0])
    total, values = multiply_adds(network, plan)
    total += 112 * 112 * 48 * 27 + 7 * 7 * 448 * 1792 + 1792 * 1000
    values += 112 * 112 * 48 + 7 * 7 * 1792
    assert (total + 5 * values) / 1e6 == pytest.approx(FLOPS_OF_DEPTHSHRINKER[name], abs=1)


def test_costs_are_the_published_savings():
    """Before and after merging, as published for width 1.0."""
    before = "42.85 89.55 63.13 37.51 23.34 23.34 13.63 13.05 13.05 13.05 13.67 20.84 20.84 11.77 9.14 9.14 11.16"
    after = "24.7 4.03 5.16 1.73 2.41 2.41 1.12 1.6 1.6 1.6 2.03 2.99 2.99 2.28 1.79 1.79 2.68"
    saved = [float(one) - float(two) for one, two in zip(before.split(), after.split(), strict=True)]
    assert COSTS["1.0"] == pytest.approx(saved, abs=1e-9)
    assert len(COSTS["1.4"]) == 17


def torchvision_without_stem_and_head():
    model = import_torchvision().models.mobilenet_v2(weights=None)
    return df.trace(model, torch.randn(1, 3, 32, 32), ignore=["features.0", "features.18"]), 0


def torchvision_for_cifar():
    """As in experiments/cifar_networks.py: stem and second stage without stride."""
    model = import_torchvision().models.mobilenet_v2(weights=None, num_classes=10)
    model.features[0][0].stride = model.features[2].conv[1][0].stride = (1, 1)
    return df.trace(model, torch.randn(1, 3, 32, 32)), 1


def timm_1_4():
    return df.trace(import_timm().create_model("mobilenetv2_140"), torch.randn(1, 3, 64, 64)), 1


@pytest.mark.parametrize("make", [torchvision_without_stem_and_head, torchvision_for_cifar, timm_1_4])
def test_patterns_fit_mobilenets_of_all_libraries(make):
    """If the stem is a layer, all positions are one larger."""
    traced, shift = make()
    assert [(block.i - shift, block.j - shift) for block in inverted_residuals(traced.network)] == [
        (max(3 * b - 1, 0), 2 + 3 * b) for b in range(17)
    ]
    plan = depthshrinker_plan(traced, "DS-D-1.0")
    expected = depthshrinker_plan(mobilenet_v2(), "DS-D-1.0")
    own = {1} | ({traced.depth} if shift else set())  # stem and last convolution
    assert plan.activations - (own if shift else set()) == {l + shift for l in expected.activations}
    assert df.rewrite(traced, plan)


def test_pattern_is_merged_exactly():
    model = import_torchvision().models.mobilenet_v2(weights=None, width_mult=0.35, num_classes=3).double()
    traced = df.trace(model, torch.randn(2, 3, 32, 32).double())
    student = df.rewrite(traced, depthshrinker_plan(traced, "DS-F-1.4")).eval()
    merged = df.merge(student)
    assert df.verify(student, merged)
    assert sum(isinstance(part, torch.nn.Conv2d) for part in merged.modules()) == 2 + 17


@pytest.mark.parametrize("network", [resnet34(), plain_chain(5)], ids=["ResNet-34", "chain"])
def test_other_networks_are_refused(network):
    message = rf"17 inverted residual blocks of MobileNetV2, but {network.name} has 0,.* search_depthshrinker\(\)"
    with pytest.raises(InvalidValue, match=message):
        depthshrinker_plan(network, "DS-A-1.0")


def test_seventeen_blocks_with_other_skips_are_refused():
    """MnasNet also has 17 blocks, the first of two layers."""
    model = import_torchvision().models.mnasnet1_0(weights=None)
    traced = df.trace(model, torch.randn(1, 3, 64, 64))
    assert len(inverted_residuals(traced.network)) == 17
    with pytest.raises(
        InvalidValue, match=r"MNASNet has 17, of which \(2, 3, 5, 6, 8, 9, 11, 13, 14, 15\) have a skip"
    ):
        depthshrinker_plan(traced, "DS-A-1.0")


def test_unknown_pattern_is_refused_with_a_suggestion():
    with pytest.raises(
        InvalidValue, match=r"no pattern 'DS-A-1'\. Did you mean 'DS-A-1\.\d'\? The patterns are DS-A-1.0"
    ):
        depthshrinker_plan(mobilenet_v2(), "DS-A-1")


def small_network(**given):
    """A layer, an inverted residual block with a skip, and a 1x1 layer without an activation."""
    build = Builder(4, 8)
    build.add(4)
    build.add(8, kernel=1)
    build.add(8, groups=8)
    build.add(4, None, kernel=1)
    build.skip(1)
    build.add(4, None, kernel=1)
    return build.network("small", **given)


def test_barrier_inside_a_block_breaks_it():
    assert inverted_residuals(small_network()) == (df.Span(1, 4),)
    assert inverted_residuals(replace(small_network(), skips=(), barriers=(2,))) == ()


def test_no_activation_is_inserted_at_the_output():
    network = small_network(ends_in_output=True)
    assert plan_without(network, [df.Span(1, 4)]) == df.Plan([1, 4], [1, 4])
    assert plan_without(network, [df.Span(0, 5)]) == df.Plan([], [])
    assert plan_without(small_network(), [df.Span(0, 5)]) == df.Plan([5], [])


def test_spans_that_overlap_or_cannot_be_merged_are_refused():
    with pytest.raises(PlanError, match=r"\(1, 4\] overlaps with the one before it, which ends at 4"):
        plan_without(small_network(), [df.Span(1, 4), df.Span(0, 4)])
    with pytest.raises(PlanError, match=r"\(2, 5\] cannot be merged"):
        plan_without(small_network(), [df.Span(2, 5)])
