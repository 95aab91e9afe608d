"""Seeded bugs: each one, put into our implementation, must turn an exactness check red.

The check compares with tests/reference.py, which shares no code with the implementation, and does so with merge's own
verification on and off: neither of the two may be the only one that notices.
"""

import importlib
from dataclasses import replace

import pytest
import torch

import depthfold as df
from depthfold.algebra import Kernel, compose
from depthfold.core import ConvShape
from depthfold.errors import DepthfoldError, VerificationError
from depthfold.testing import Block, Conv, NetworkSpec, Pool, SmallCNN, randomise_statistics
from nets import agree
from reference import evaluate

# Modules by name: some share theirs with the function inside.
chains, drafts, numbering, pooling, shapes, padding, activations, rewriting, kernels, cleaning, merging = (
    importlib.import_module(f"depthfold.{name}")
    for name in (
        "tracing.chains",
        "tracing.drafts",
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


def conv(out=4, kernel=(3, 3), stride=1, pad=None, dilation=1, **given):
    """A convolution that keeps the size unless told otherwise."""
    if pad is None:
        pad = tuple(((k - 1) * dilation // 2,) * 2 for k in kernel)
    return Conv(out=out, kernel=kernel, stride=(stride,) * 2, padding=pad, dilation=(dilation,) * 2, **given)


def network(*parts, channels=4):
    return NetworkSpec(channels=channels, size=(11, 10), parts=parts)


def row(*items):
    return Block(items=items)


NETWORKS = {
    "strides": (
        network(
            row(conv(stride=2, eps=0.1), conv(6, (3, 2), pad=((1, 1), (0, 2))), conv(4, (1, 1)), conv(4, stride=2))
        ),
        [((), ()), ((2,), (2,)), ((1, 4), (1,))],
    ),
    "residual": (
        network(
            row(conv(eps=0.5)),
            Block(items=(conv(), conv(activation=None, kernel=(3, 1))), skip="identity"),
            row(conv(bias=False)),
        ),
        [((), ()), ((1, 3), (1, 3)), ((1, 3), (1, 2, 3)), ((3,), (3,))],
    ),
    "projection": (
        network(
            row(conv()),
            Block(
                items=(conv(6, stride=2), conv(6, activation=None)),
                skip="projection",
                stride=(2, 2),
                activation="method",
            ),
            row(conv(eps=None)),
        ),
        [((), ()), ((1,), (1,)), ((1, 2, 3), (1, 2, 3))],
    ),
    "branches": (
        network(
            row(
                conv(beside=("point", "norm", "pool"), nested=True),
                conv(beside=("identity", "pool and point"), nested=True),
                conv(6, stride=2, beside=("twin", "point", "pool and point")),
                conv(groups=2),
            ),
        ),
        [((), ()), ((1, 2, 3), (1, 2, 3)), ((2,), (2,)), ((1,), (1,)), ((3,), (3,))],
    ),
    "groups": (
        network(
            row(
                conv(12, groups=2),
                conv(12, groups=4),
                conv(6, (1, 1), groups=6),
                conv(12, groups=3),
                conv(12, groups=12),
                conv(4, groups=4, kernel=(1, 1)),
            ),
            channels=8,
        ),
        [((), ()), ((2,), (2,)), ((1, 3, 5), (1, 3, 5)), ((4,), (4,))],
    ),
    "dilations": (
        network(
            row(
                conv(dilation=2), conv(kernel=(2, 3), dilation=2), conv(kernel=(3, 3)), conv(kernel=(3, 1), dilation=3)
            ),
        ),
        [((), ()), ((2,), (2,)), ((), (1,))],
    ),
    "same": (
        network(
            row(
                conv(kernel=(2, 4), pad=((0, 1), (1, 2)), same=True),
                conv(),
                conv(kernel=(4, 2), pad=((1, 2), (0, 1)), same=True),
            ),
            Pool(),
            row(conv(kernel=(2, 2), pad=((0, 1), (0, 1)), same=True), conv()),
        ),
        [((), ()), ((1, 2, 3), (1, 2, 3, 4))],
    ),
}


def check():
    """Rewritten and merged networks against the second computation of what they must give."""
    for seed, (spec, plans) in enumerate(NETWORKS.values()):
        torch.manual_seed(seed)
        model = randomise_statistics(SmallCNN(spec), seed).double().eval()
        x = torch.randn(2, spec.channels, *spec.size, dtype=torch.float64)
        traced = df.trace(model, x)
        with torch.no_grad():
            for positions, cuts in plans:
                plan = df.Plan(positions, cuts)
                student = df.rewrite(traced, plan)
                shallow = df.merge(student)
                for inputs in (x, torch.randn(1, spec.channels, 13, 14, dtype=torch.float64)):
                    wanted = evaluate(model, inputs, plan)
                    agree(student(inputs), wanted)
                    agree(shallow(inputs), wanted)


FAULTS = {}


def fault(function):
    FAULTS[function.__name__.replace("_", " ")] = function
    return function


def instead(patch, home, name, make):
    """Put make(original) in the place of home.name."""
    patch.setattr(home, name, make(getattr(home, name)))


@fault
def eps_fixed(patch):
    for home in (kernels, cleaning):
        instead(patch, home, "fold_norm", lambda fold: lambda kernel, norm: fold(kernel, replace(norm, eps=1e-5)))


@fault
def mean_of_the_norm_forgotten(patch):
    for home in (kernels, cleaning):
        instead(
            patch,
            home,
            "fold_norm",
            lambda fold: lambda kernel, norm: fold(kernel, replace(norm, mean=torch.zeros_like(norm.mean))),
        )


@fault
def padding_not_moved(patch):
    patch.setattr(rewriting, "move_padding", lambda *given: None)


@fault
def padding_moved_without_the_strides_before_it(patch):
    def wrong(then):
        def composed(one, two):
            plain = tuple((a + c, b + d) for (a, b), (c, d) in zip(one.padding, two.padding, strict=True))
            return replace(then(one, two), padding=plain)

        return composed

    instead(patch, ConvShape, "then", wrong)


@fault
def stride_ignored_in_the_composition(patch):
    def wrong(then):
        def composed(one, two):
            ones = (1,) * one.dims
            return replace(then(replace(one, stride=ones), two), stride=then(one, two).stride)

        return composed

    instead(patch, ConvShape, "then", wrong)


@fault
def stride_ignored_in_the_weights_alone(patch):
    def wrong(original):
        def composed(first, one, second, two):
            wanted = original(first, one, second, two)
            narrow = original(first, replace(one, stride=(1,) * one.dims), second, two)
            out = torch.zeros_like(wanted)
            out[tuple(slice(0, n) for n in narrow.shape)] = narrow
            return out

        return composed

    instead(patch, importlib.import_module("depthfold.algebra.kernel"), "compose_weights", wrong)


@fault
def kernel_flipped(patch):
    instead(
        patch,
        importlib.import_module("depthfold.algebra.kernel"),
        "compose_weights",
        lambda original: lambda first, one, second, two: original(first, one, second.flip(2, 3), two),
    )


@fault
def bias_not_pushed_through_the_next_kernel(patch):
    instead(patch, Kernel, "then", lambda then: lambda one, two: replace(then(one, two), bias=two.bias))


@fault
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

    instead(patch, Kernel, "then", wrong)


@fault
def groups_mixed_where_they_are_joined(patch):
    def wrong(original):
        def regrouped(weight, groups, fewer):
            out = original(weight, groups, fewer)
            return out if groups == fewer else out.flip(1)

        return regrouped

    instead(patch, compose, "regroup", wrong)


@fault
def subgroups_in_the_wrong_order(patch):
    def wrong(original):
        return lambda out, merged: out.reshape(merged.out_channels, merged.in_channels // merged.groups, *merged.kernel)

    instead(patch, compose, "_ungroup", wrong)


@fault
def groups_lost(patch):
    instead(patch, ConvShape, "then", lambda then: lambda one, two: replace(then(one, two), groups=1))


@fault
def skip_not_folded(patch):
    patch.setattr(Kernel, "plus", lambda kernel, skip, **_: kernel)


@fault
def skip_folded_beside_the_centre(patch):
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

    instead(patch, Kernel, "plus", wrong)


@fault
def skip_not_cropped(patch):
    patch.setattr(padding, "_crop_skip", lambda *given: None)


@fault
def skip_cropped_at_one_side(patch):
    instead(
        patch,
        padding,
        "crop_of",
        lambda crop: lambda *given: tuple((a + 1, b - 1) for a, b in crop(*given)),
    )


@fault
def dilation_ignored(patch):
    patch.setattr(compose, "spread", lambda weight, dilation, grid: weight)


@fault
def dilation_of_the_second_ignored(patch):
    def wrong(then):
        def composed(one, two):
            ones = (1,) * one.dims
            return then(one, replace(two, dilation=ones))

        return composed

    instead(patch, ConvShape, "then", wrong)


@fault
def norm_of_the_projection_forgotten(patch):
    instead(patch, numbering, "StepSite", lambda site: lambda **given: site(**given | {"norm": None}))


@fault
def branch_inside_a_sum_lost(patch):
    def wrong(original):
        return lambda *given: (site for site in original(*given) if not site.sums)

    instead(patch, numbering, "_skip_sites", wrong)


@fault
def second_step_of_a_branch_forgotten(patch):
    patch.setattr(kernels, "reduce", lambda compose, steps: next(iter(steps)))


@fault
def pool_divides_by_its_width(patch):
    patch.setattr(pooling.AveragePool, "divisor", property(lambda pool: pool.kernel[-1]))


@fault
def padding_of_a_pool_not_moved(patch):
    patch.setattr(padding, "_take_out_padding_of_pool", lambda *given: None)


@fault
def identity_inside_a_sum_not_cropped(patch):
    def wrong(original):
        def entry(graph, nodes, site):
            return original(graph, nodes, site if site.steps else replace(site, sums=()))

        return entry

    instead(patch, padding, "_entry", wrong)


@fault
def activation_inserted_before_the_addition(patch):
    def wrong(insert):
        def inserted(graph, nodes, traced, l):
            sites = tuple(replace(site, out=site.linear) for site in traced.blueprint.sites)
            insert(graph, nodes, replace(traced, blueprint=replace(traced.blueprint, sites=sites)), l)

        return inserted

    instead(patch, rewriting, "insert_activation", wrong)


@fault
def activation_not_inserted(patch):
    patch.setattr(rewriting, "insert_activation", lambda *given: None)


@fault
def activation_not_removed(patch):
    patch.setattr(rewriting, "remove_activation", lambda *given: None)


@fault
def odd_padding_of_same_in_front(patch):
    def wrong(original):
        return lambda layer: tuple((b, a) if layer.padding == "same" else (a, b) for a, b in original(layer))

    for home in (shapes, cleaning):
        instead(patch, home, "module_padding", wrong)


@fault
def padding_before_a_layer_forgotten(patch):
    instead(patch, shapes, "pad_widths", lambda original: lambda node, modules, dims: ((0, 0),) * dims)


@fault
def sides_of_the_padding_swapped(patch):
    instead(
        patch,
        shapes,
        "pad_widths",
        lambda original: lambda *given: tuple((b, a) for a, b in original(*given)),
    )


def test_the_check_passes_without_a_fault():
    check()


# What a seeded bug may end in: a wrong value, a refusal of ours, or tensors that do not fit. Not in a bug of the bug.
RED = (AssertionError, DepthfoldError, RuntimeError, IndexError)


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_turns_the_check_red(name, monkeypatch):
    FAULTS[name](monkeypatch)
    with pytest.raises(RED):
        check()


@pytest.fixture
def unverified(monkeypatch):
    """merge() takes its own result on trust."""
    verification = importlib.import_module("depthfold.merging.verify").Verification
    monkeypatch.setattr(merging, "verify", lambda *given: verification((), 0.0, 1.0))


@pytest.mark.usefixtures("unverified")
def test_the_check_passes_without_a_fault_and_without_verification():
    check()


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_turns_the_comparison_red_without_verification(name, monkeypatch):
    FAULTS[name](monkeypatch)
    with pytest.raises(RED) as found:
        check()
    assert not isinstance(found.value, VerificationError)


# Faults that damage student and merged network alike: verification compares the two, so it cannot see them.
ALIKE = {
    "activation not inserted",
    "odd padding of same in front",
    "padding moved without the strides before it",
    "sides of the padding swapped",
}


@pytest.mark.parametrize("name", sorted(set(FAULTS) - ALIKE))
def test_verification_alone_notices_every_other_fault(name, monkeypatch):
    monkeypatch.setattr(f"{__name__}.agree", lambda *given: None)
    FAULTS[name](monkeypatch)
    with pytest.raises((DepthfoldError, RuntimeError)):
        check()
