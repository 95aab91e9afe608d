"""Rewriting and merging are exact for random small CNNs and random plans."""

from itertools import pairwise
from random import Random

import torch
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

import depthfold as df
from depthfold.testing import SmallCNN, random_plan, randomise_statistics
from depthfold.testing.strategies import network_specs
from reference import chains_of, evaluate, program


def build(spec, seed):
    torch.manual_seed(seed)
    model = randomise_statistics(SmallCNN(spec), seed).double().eval()
    x = torch.randn(2, spec.channels, *spec.size, dtype=torch.float64)
    try:
        with torch.no_grad():
            model(x)
    except RuntimeError as error:
        assume("size" not in str(error).lower())  # a feature map is too small for a kernel or a pool
        raise
    return model, x


def close(found, wanted):
    assert found.shape == wanted.shape
    largest = wanted.abs().max()
    assert (found - wanted).abs().max() <= 1e-10 * largest


@given(spec=network_specs(), seed=st.integers(0, 2**16), drops=st.sampled_from((0, 0.4, 0.9)))
def test_rewritten_and_merged_networks_are_exact_and_have_the_predicted_shapes(spec, seed, drops):
    model, x = build(spec, seed)
    traced = df.trace(model, x)
    steps, depth = program(model)
    assert traced.depth == depth
    bounds = (0, *traced.network.barriers, depth) if depth else ()
    assert [*pairwise(bounds)] == [(c.start, c.end) for c in chains_of(steps)]
    plan = random_plan(traced.network, Random(seed), largest=50_000, drops=drops)
    segments = [span for span in traced.network.segments(plan) if plan.dropped.kept(span)]
    event(f"dropped layers: {bool(plan.dropped.layers)}, branches: {bool(plan.dropped.branches)}")
    event(f"empty segments: {len(segments) < len(traced.network.segments(plan))}")
    event(f"longest segment {max((len(s) for s in segments), default=0)}")
    event(f"skips inside segments: {any(s.contains(k.span) for s in segments for k in traced.network.skips)}")
    event(f"branches parallel to a layer: {sum(k.target == k.source + 1 for k in traced.network.skips)}")

    student = df.rewrite(traced, plan)
    shallow = df.merge(student)
    odd = torch.randn(1, spec.channels, *(n + 1 for n in spec.size), dtype=torch.float64)
    with torch.no_grad():
        for inputs in (x, odd):
            wanted = evaluate(model, inputs, plan)
            close(student(inputs), wanted)
            close(shallow(inputs), wanted)
        close(df.rewrite(traced, traced.vanilla)(x), model(x))
    convs = sum(isinstance(m, torch.nn.modules.conv._ConvNd) for m in shallow.modules())
    explicit = sum(
        skip.projection is not None
        and not any(s.contains(skip.span) for s in segments)
        and not plan.dropped.covers(skip.span)
        for skip in traced.network.skips
    )
    assert convs == len(segments) + explicit
    called = [node.target for node in shallow.graph.nodes if node.op == "call_module"]
    assert sum(isinstance(shallow.get_submodule(t), torch.nn.modules.conv._ConvNd) for t in called) == convs
    assert not any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in shallow.modules())
    check_predicted_shapes(traced.network, plan, segments, shallow)
    assert df.Network.loads(traced.network.dumps()) == traced.network


def check_predicted_shapes(network, plan, segments, shallow):
    for span in segments:
        shape = network.merged_shape(span, plan.dropped)
        conv = shallow.get_submodule(network.layers[plan.dropped.kept(span)[0] - 1].where)
        assert conv.kernel_size == shape.kernel
        assert (conv.stride, conv.dilation, conv.groups) == (shape.stride, shape.dilation, shape.groups)
        assert sum(p.numel() for p in conv.parameters()) == shape.parameters


@given(spec=network_specs(), seed=st.integers(0, 2**16))
@settings(max_examples=max(settings().max_examples // 4, 6))
def test_merging_in_float32_is_within_tolerance(spec, seed):
    model, x = build(spec, seed)
    model, x = model.float(), x.float()
    traced = df.trace(model, x)
    student = df.rewrite(traced, random_plan(traced.network, Random(seed + 2), largest=50_000))
    shallow = df.merge(student)
    with torch.no_grad():
        wanted = student(x)
        assert (shallow(x) - wanted).abs().max() <= 1e-4 * wanted.abs().max()
