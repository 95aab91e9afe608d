"""Merged networks of plans with dropped layers and branches."""

import copy
from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision import models

import depthfold as df
from depthfold.core import Drops, Span
from depthfold.merging import replace_segment, shallow_parts, sketch
from depthfold.merging.kernels import as_module, segment_kernel
from depthfold.testing import random_plan, randomise_statistics
from depthfold.tracing import student_parts
from nets import Net, agree, conv, image

REAL = {
    "mobilenet_v2": lambda: models.mobilenet_v2(weights=None, num_classes=10, width_mult=0.5),
    "resnet18": lambda: models.resnet18(weights=None, num_classes=10),
    "bottlenecks": lambda: models.ResNet(models.resnet.Bottleneck, [2, 2, 1, 1], num_classes=10, width_per_group=16),
    "regnet": lambda: models.regnet_y_400mf(weights=None, num_classes=10).trunk_output,
    "efficientnet": lambda: models.efficientnet_b0(weights=None, num_classes=10).features[:4],
}


@pytest.mark.parametrize("name", REAL)
def test_real_networks_merge_exactly_with_random_drops(name):
    torch.manual_seed(1)
    model = randomise_statistics(REAL[name](), seed=2).double().eval()
    channels = next(model.parameters()).shape[1]
    x = torch.randn(1, channels, 65, 65, dtype=torch.float64)
    traced = df.trace(model, x)
    seen = Drops()
    for seed, share in enumerate((0.4, 1.2)):
        plan = random_plan(traced.network, Random(seed), largest=150_000, drops=share)
        seen |= plan.dropped
        student = df.rewrite(traced, plan)
        shallow = df.merge(student)
        assert set(student.state_dict()) <= set(model.state_dict())
        with torch.no_grad():
            for size in ((65, 65), (64, 71)):
                x = torch.randn(1, channels, *size, dtype=torch.float64)
                agree(shallow(x), student(x))
        segments = traced.network.segments(plan)
        left = [span for span in segments if plan.dropped.kept(span)]
        assert [nodes.span for nodes in shallow_parts(shallow)[1].segments] == left
    assert seen.layers and bool(seen.branches) == bool(traced.network.droppable_branches)


def network():
    """Return layers 1 to 6 with the residuals 1 -> 3 and 3 -> 5, and a branch that ends without an activation."""

    def run(net, x):
        x = net.act(net.norm1(net.conv1(x)))
        x = net.act(net.norm3(net.conv3(net.act(net.norm2(net.conv2(x))))) + x)
        x = net.norm5(net.conv5(net.act(net.conv4(x)))) + x
        return net.conv6(x)

    torch.manual_seed(0)
    convs = {f"conv{l}": conv(kernel=5 if l == 4 else 3) for l in range(1, 7)}
    norms = {f"norm{l}": nn.BatchNorm2d(4) for l in (1, 2, 3, 5)}
    model = Net(run, act=nn.ReLU(), **convs, **norms)
    return randomise_statistics(model).double().eval()


def merged(plan, x=None, act=None):
    x = image().double() if x is None else x
    model = network()
    model.act = act or model.act
    traced = df.trace(model, x)
    assert sorted((s.source, s.target) for s in traced.network.skips) == [(1, 3), (3, 5)]
    student = df.rewrite(traced, plan).eval()
    return student, df.merge(student)


def convolutions(module):
    return {name: part for name, part in module.named_modules() if isinstance(part, nn.Conv2d)}


# A plan, and the convolutions of its merged network with their kernels.
PLANS = {
    "a layer inside a segment": (df.Plan((1,), (1, 3), Drops([2])), {"conv1": 3, "conv3": 3, "conv4": 9}),
    "an empty segment": (df.Plan((1, 2), (1, 2, 3), Drops([2])), {"conv1": 3, "conv3": 3, "conv4": 9}),
    "an empty segment before an addition": (
        df.Plan((2, 3), (1, 2, 3), Drops([3])),
        {"conv1": 3, "conv2": 3, "conv4": 9},
    ),
    "an empty segment at the start": (df.Plan((1, 3), (1, 3), Drops([1])), {"conv2": 5, "conv4": 9}),
    "an empty segment at the end": (df.Plan((1, 3, 5), (1, 3, 5), Drops([6])), {"conv1": 3, "conv2": 5, "conv4": 7}),
    "a branch": (df.Plan((1, 3), (1, 3), Drops((), [Span(1, 3)])), {"conv1": 3, "conv4": 9}),
    "a branch inside a segment": (df.Plan((), (), Drops((), [Span(1, 3)])), {"conv1": 11}),
    "a branch at the end of a segment": (df.Plan((3,), (3,), Drops((), [Span(1, 3)])), {"conv1": 3, "conv4": 9}),
    "both branches": (df.Plan((), (1,), Drops((), [Span(1, 3), Span(3, 5)])), {"conv1": 3, "conv6": 3}),
    "a branch at the start of a segment": (df.Plan((1,), (1,), Drops((), [Span(1, 3)])), {"conv1": 3, "conv4": 9}),
    "a value added to itself": (df.Plan((), (), Drops([2, 3])), {"conv1": 11}),
    "a value added to itself first": (df.Plan((1,), (1,), Drops([2, 3, 5])), {"conv1": 3, "conv4": 7}),
}


@pytest.mark.parametrize("name", PLANS)
def test_merged_network_has_the_convolutions_that_are_left(name):
    plan, wanted = PLANS[name]
    student, shallow = merged(plan)
    assert {where: part.kernel_size[0] for where, part in convolutions(shallow).items()} == wanted
    with torch.no_grad():
        for size in (12, 17):
            x = image(size).double()
            agree(shallow(x), student(x))


def test_empty_segments_leave_activations_and_additions_alone():
    _, shallow = merged(df.Plan((2, 3), (1, 2, 3, 5), Drops([3, 6])))
    called = [node.target for node in shallow.graph.nodes if node.op == "call_module"]
    assert called == ["conv1", "conv2", "act", "act", "conv4"]
    assert [name for name, _ in shallow.named_parameters() if "conv" not in name] == []
    # Layer 3 is between an activation and the addition of its residual: only the addition is left.
    functions = [node for node in shallow.graph.nodes if node.op == "call_function"]
    assert [str(node.target) for node in functions] == ["<built-in function add>"]
    assert [operand.name for operand in functions[0].all_input_nodes] == ["act_1", "conv1_1"]


# After the branch 1 -> 3, only its activation is left. It is the second one in a row if layer 1 has one.
@pytest.mark.parametrize(
    ("act", "activations", "left"),
    [
        (nn.ReLU(), (1, 3), 1),
        (nn.ReLU6(inplace=True), (1, 3), 1),
        (nn.ReLU(), (3,), 1),
        (nn.LeakyReLU(), (1, 3), 2),
        (nn.Hardswish(), (1, 3), 2),
    ],
)
def test_activation_that_repeats_the_one_before_it_is_removed(act, activations, left):
    student, shallow = merged(df.Plan(activations, (1, 3), Drops((), [Span(1, 3)])), act=act)
    called = [node.target for node in shallow.graph.nodes if node.op == "call_module"]
    assert called == ["conv1", *["act"] * left, "conv4"]
    assert df.verify(student, shallow, image(19).double()).ok
    with torch.no_grad():
        agree(shallow(image().double()), student(image().double()))


@pytest.mark.parametrize("function", [F.relu, torch.relu, lambda x: x.relu(), F.hardswish])
def test_repeated_activation_is_removed_if_it_is_a_function(function):
    student, shallow = merged(df.Plan((1, 3), (1, 3), Drops((), [Span(1, 3)])), act=Net(lambda net, x: function(x)))
    kept = [node for node in shallow.graph.nodes if "relu" in node.name or "hardswish" in node.name]
    assert len(kept) == (2 if function is F.hardswish else 1)
    with torch.no_grad():
        agree(shallow(image().double()), student(image().double()))


def test_verification_compares_the_segments_that_are_left():
    student, shallow = merged(df.Plan((1, 2), (1, 2, 3), Drops([2])))
    found = df.verify(student, shallow, image(19).double())
    assert found.ok and [errors.span for errors in found.segments] == [Span(0, 1), Span(2, 3), Span(3, 6)]
    with torch.no_grad():
        shallow.conv3.weight[0, 0, 1, 1] += 1e-3
    found = df.verify(student, shallow)
    assert not found.ok
    assert [errors.span for errors in found.segments if errors.interior > 1e-6] == [Span(2, 3)]


def test_error_of_a_segment_is_found_if_the_next_segment_follows_without_an_activation():
    student, shallow = merged(df.Plan((), (1, 3)))
    with torch.no_grad():
        shallow.conv1.weight[0, 0, 1, 1] += 1e-3
    wrong = [errors.span for errors in df.verify(student, shallow).segments if errors.interior > 1e-6]
    assert wrong == [Span(0, 1)]


def test_networks_of_different_drops_are_not_compared():
    student, _ = merged(df.Plan((), (1,)))
    _, shallow = merged(df.Plan((), (1,), Drops([2])))
    with pytest.raises(df.errors.InvalidValue, match="made from another plan"):
        df.verify(student, shallow)


@pytest.mark.parametrize("name", PLANS)
def test_sketch_has_the_shapes_of_the_merged_network(name):
    student, shallow = merged(PLANS[name][0])
    shapes = {name: tensor.shape for name, tensor in shallow.state_dict().items()}
    assert {name: tensor.shape for name, tensor in sketch(student).state_dict().items()} == shapes


@pytest.mark.parametrize("name", PLANS)
def test_every_segment_can_be_replaced_with_its_kernel(name):
    plan = PLANS[name][0]
    student, _ = merged(plan)
    graph, origin, _ = student_parts(student)
    x = image().double()
    with torch.no_grad():
        wanted = student(x)
        for span in origin.blueprint.network.segments(plan):
            if plan.dropped.kept(span):
                changed = copy.deepcopy(student)
                nodes = {node.name: node for node in graph.graph.nodes}
                kernel = segment_kernel(graph, nodes, origin.blueprint, span, plan.dropped)
                replace_segment(changed, span, as_module(kernel, x))
                agree(changed(x), wanted)


@pytest.mark.parametrize("name", PLANS)
def test_saved_networks_keep_what_is_dropped(name, tmp_path):
    plan = PLANS[name][0]
    _, shallow = merged(plan)
    loaded = df.load(df.save(shallow, tmp_path), network())
    assert shallow_parts(loaded)[1].plan == plan
    x = image().double()
    assert torch.equal(loaded(x), shallow(x))
