"""Networks: their spans and flagged spans, refusals, plans, and printed tables."""

from collections import Counter
from itertools import combinations

import pytest

from depthfold.core import FlaggedSpan, Layer, Network, Plan, Refusal, Skip, Span
from depthfold.errors import InvalidValue, PlanError
from structures import Builder, chain, mobilenet_v2, resnet34, shape, vgg19

RESIDUALS = ((5, 8), (11, 14), (14, 17), (20, 23), (23, 26), (26, 29), (32, 35), (35, 38), (41, 44), (44, 47))
BLOCK_ENDS = {2 + 3 * n for n in range(17)}


def enumerate_spans(depth, barriers, residuals):
    """Yield the spans (i, j] by the rules of the paper's code, implemented independently."""
    for i, j in combinations(range(depth + 1), 2):
        stride_rule = not any(i < p < j for p in barriers)
        skip_rule = not any((s < i < t and j > t) or (i < s and s < j < t) for s, t in residuals)
        if stride_rule and skip_rule:
            yield i, j


def pairs(spans):
    return [(span.i, span.j) for span in spans]


@pytest.fixture(scope="module", params=[1.0, 1.4])
def mobilenet(request):
    return mobilenet_v2(request.param)


def test_mobilenet_v2_has_50_layers_33_activations_and_10_residuals(mobilenet):
    assert mobilenet.depth == 50
    assert mobilenet.activations == set(range(1, 51)) - BLOCK_ENDS
    assert tuple((skip.source, skip.target) for skip in mobilenet.skips) == RESIDUALS
    assert mobilenet.barriers == ()


def test_mobilenet_v2_has_the_171_spans_of_the_paper(mobilenet):
    expected = list(enumerate_spans(50, (5, 11, 20, 41), RESIDUALS))
    assert len(expected) == 171
    assert pairs(mobilenet.spans("paper")) == expected
    assert pairs(mobilenet.spans()) == expected
    assert max(j - i for i, j in expected) == 21


def test_mobilenet_v2_merges_to_the_kernels_of_the_paper(mobilenet):
    kernels = Counter(mobilenet.merged_shape(span).kernel for span in mobilenet.spans("paper"))
    found = {kernel[0]: count for kernel, count in kernels.items() if kernel[0] == kernel[1]}
    assert found == {1: 34, 3: 75, 5: 25, 7: 17, 9: 9, 11: 5, 13: 4, 15: 2}


def test_full_space_of_mobilenet_v2_has_every_span_that_merges(mobilenet):
    assert pairs(mobilenet.spans("full")) == list(enumerate_spans(50, (), RESIDUALS))


def enumerate_flagged(exclusion):
    for i, j in enumerate_spans(50, (5, 11, 20, 41), RESIDUALS):
        starts = (True, False) if i in BLOCK_ENDS else (True,)
        ends = (True, False) if j in BLOCK_ENDS else (True,)
        if exclusion and (i == 0 or i in BLOCK_ENDS):
            ends = (True,)
        yield from ((i, j, a, b) for a in starts for b in ends)


@pytest.mark.parametrize(("exclusion", "count"), [(True, 315), (False, 405)])
def test_mobilenet_v2_has_the_flagged_spans_of_the_paper(mobilenet, exclusion, count):
    expected = set(enumerate_flagged(exclusion))
    assert len(expected) == count
    found = mobilenet.flagged_spans("paper", exclusion=exclusion)
    assert len(found) == count
    assert set(found) == {FlaggedSpan(*key) for key in expected}


def test_exclusion_is_on_in_the_papers_space_and_off_in_the_full_one(mobilenet):
    assert mobilenet.flagged_spans() == mobilenet.flagged_spans("paper", exclusion=True)
    assert mobilenet.flagged_spans("full") == mobilenet.flagged_spans("full", exclusion=False)
    assert sum(len(flagged.span) == 1 for flagged in mobilenet.flagged_spans("paper")) == 83


def test_vgg19_has_36_spans_between_its_pools():
    network = vgg19()
    assert network.depth == 16
    assert network.barriers == (2, 4, 8, 12)
    expected = list(enumerate_spans(16, (2, 4, 8, 12), ()))
    assert len(expected) == 36
    assert pairs(network.spans("paper")) == pairs(network.spans("full")) == expected
    assert {(f.a, f.b) for f in network.flagged_spans("paper")} == {(True, True)}
    assert len(network.flagged_spans("paper")) == 36


def test_resnet34_has_62_spans_and_its_projections_are_folded():
    network = resnet34()
    assert network.depth == 32
    residuals = [(s, s + 2) for s in range(0, 32, 2)]
    expected = list(enumerate_spans(32, (7, 15, 27), residuals))
    assert len(expected) == 62
    assert pairs(network.spans("paper")) == expected
    assert pairs(network.spans("full")) == list(enumerate_spans(32, (), residuals))
    merged = network.merged_shape(Span(6, 8))
    assert (merged.kernel, merged.stride, merged.padding) == ((7, 7), (2, 2), ((3, 3), (3, 3)))


def test_strided_layer_merges_with_1x1_layers_up_to_the_end_of_its_block():
    build = Builder(4, 16)
    build.add(4, kernel=3, stride=2)
    build.add(4, kernel=1)
    build.add(4, kernel=1, activation=None)
    build.add(4, kernel=1)
    network = build.network("block")
    assert (0, 3) in pairs(network.spans("paper"))
    assert (0, 4) not in pairs(network.spans("paper"))
    assert (0, 4) in pairs(network.spans("full"))


def test_paper_space_has_no_kernel_after_a_stride():
    build = Builder(4, 16)
    build.add(4, kernel=3, stride=2)
    build.add(4, kernel=3)
    assert pairs(build.network("two").spans("paper")) == [(0, 1), (1, 2)]
    assert pairs(build.network("two").spans("full")) == [(0, 1), (0, 2), (1, 2)]


@pytest.mark.parametrize("ask", ["spans", "flagged_spans"])
def test_unknown_space_is_refused(ask):
    with pytest.raises(InvalidValue, match=r"There is no search space 'large'\. Use 'paper' or 'full'"):
        getattr(chain(3, 3), ask)("large")


def test_network_without_activations_has_one_choice_of_flags():
    build = Builder(4, 16)
    build.add(4, activation=None)
    build.add(4, activation=None)
    assert set(build.network("linear").flagged_spans("full")) == {
        FlaggedSpan(0, 1, True, False),
        FlaggedSpan(0, 2, True, False),
        FlaggedSpan(1, 2, False, False),
    }


def test_output_keeps_its_flag_also_under_the_exclusion_rule():
    build = Builder(4, 16)
    for activation in ("relu", None, None):
        build.add(4, activation=activation)
    # Position 2 is free: in the paper's space, a span from 0 to 2 must end with an inserted activation.
    before = {(0, 1, 1, 1), (0, 2, 1, 1), (1, 2, 1, 0), (1, 2, 1, 1)}
    end = {(0, 3, 1, 0), (1, 3, 1, 0), (2, 3, 0, 0), (2, 3, 1, 0)}
    network = build.network("image", ends_in_output=True)
    assert set(network.flagged_spans("paper")) == {FlaggedSpan(*key) for key in before | end}
    assert set(network.flagged_spans("full")) == {FlaggedSpan(*key) for key in before | end | {(0, 2, 1, 0)}}
    inserted = {(0, 3, 1, 1), (1, 3, 1, 1), (2, 3, 0, 1), (2, 3, 1, 1)}
    free = set(build.network("head").flagged_spans("paper"))
    unchanged = {(1, 3, 1, 0), (2, 3, 0, 0)}
    assert free == {FlaggedSpan(*key) for key in before | inserted | unchanged}


def test_layers_can_stay_as_they_are_where_the_exclusion_rule_would_insert_an_activation():
    build = Builder(4, 16)  # as in EDSR: no activation after the first layer and after additions
    build.add(4, activation=None)
    for _ in range(2):
        build.add(4)
        build.add(4, activation=None)
        build.skip(build.position - 2)
    network = build.network("image", ends_in_output=True)
    own = network.activations
    unchanged = {FlaggedSpan(i, i + 1, i == 0 or i in own, i + 1 in own) for i in range(network.depth)}
    assert unchanged <= set(network.flagged_spans("paper"))
    assert Span(0, 2) not in network.spans("paper"), "no longer block replaces the first layer"
    assert FlaggedSpan(1, 3, False, False) not in network.flagged_spans("paper")
    assert FlaggedSpan(1, 3, False, False) in network.flagged_spans("full")


def test_output_with_an_activation_keeps_it():
    assert chain(3, 3, ends_in_output=True).flagged_spans() == chain(3, 3).flagged_spans()


def test_why_not_names_the_barrier_and_its_reason():
    refusal = vgg19().why_not(Span(1, 3))
    assert refusal == Refusal("(1, 3]", "barrier", "there is a barrier at 2: pooling is not a convolution", 2)


def test_why_not_mentions_a_new_chain_if_a_barrier_has_no_reason():
    assert chain(3, 3, barriers=(1,)).why_not(Span(0, 2)).why == "there is a barrier at 1: a new chain starts there"


def test_why_not_names_the_residual_that_is_crossed(mobilenet):
    refusal = mobilenet.why_not(Span(6, 9))
    assert refusal.code == "crosses-skip"
    assert refusal.why.startswith(
        "it crosses one end of the residual 5 -> 8; a span must contain a residual completely"
    )
    assert mobilenet.why_not(Span(4, 7)).code == "crosses-skip"


@pytest.mark.parametrize("span", [Span(5, 8), Span(4, 9), Span(5, 7), Span(6, 8), Span(2, 5), Span(8, 9)])
def test_why_not_is_none_for_spans_that_contain_touch_or_lie_inside_a_residual(mobilenet, span):
    assert mobilenet.why_not(span) is None


@pytest.mark.parametrize("bad", [(0, 1), None, FlaggedSpan(0, 1, True, True)])
def test_why_not_needs_a_span(mobilenet, bad):
    with pytest.raises(InvalidValue, match=r"why_not\(\) needs a Span, found .*\. Use, for example, Span\(0, 2\)"):
        mobilenet.why_not(bad)


def test_span_beyond_the_end_is_refused():
    assert chain(3, 3).why_not(Span(0, 3)) == Refusal("(0, 3]", "outside", "the network ends at position 2")
    with pytest.raises(PlanError, match=r"The span \(0, 3\] cannot be merged: the network ends at position 2\."):
        chain(3, 3).merged_shape(Span(0, 3))


def test_merged_shape_folds_a_nested_skip_into_the_kernel():
    build = Builder(4, 16)
    build.add(4, kernel=3, groups=4)
    build.add(4, kernel=3, groups=4)
    build.skip(1, projection=shape(4, 4, kernel=1))
    build.add(4, kernel=3, groups=4)
    build.skip(0)
    network = build.network("nested")
    merged = network.merged_shape(Span(0, 3))
    assert merged.kernel == (7, 7)
    assert merged.groups == 1  # the projection mixes the channels
    assert network.path_shape(Span(0, 3)).groups == 4
    assert network.merged_shape(Span(0, 1)).groups == 4


def test_vanilla_plan_keeps_every_activation_and_merges_nothing(mobilenet):
    assert mobilenet.vanilla == Plan(activations=mobilenet.activations, cuts=range(1, 50))
    assert [len(span) for span in mobilenet.segments(mobilenet.vanilla)] == [1] * 50


def test_segments_are_between_cuts_and_barriers():
    assert pairs(vgg19().segments(Plan((), ()))) == [(0, 2), (2, 4), (4, 8), (8, 12), (12, 16)]
    assert pairs(vgg19().segments(Plan((), (3, 4, 9)))) == [(0, 2), (2, 3), (3, 4), (4, 8), (8, 9), (9, 12), (12, 16)]


def test_last_position_may_have_an_activation(mobilenet):
    plan = Plan((2, 50), range(1, 50))
    assert len(mobilenet.segments(plan)) == 50


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            Plan((), (9,)),
            "The plan has position 9, but the network has 3 layers. Cuts must lie strictly between 0 and 3",
        ),
        (Plan((), (3,)), "Cuts must lie strictly between 0 and 3"),
        (Plan((7,), ()), "The plan has position 7, but the network has 3 layers"),
        (Plan((2,), (1,)), r"The activations \[2\] must also be cuts"),
    ],
)
def test_plan_that_does_not_fit_is_refused(plan, message):
    with pytest.raises(PlanError, match=message):
        chain(3, 3, 3).segments(plan)


def test_plan_that_crosses_residuals_names_all_of_them(mobilenet):
    with pytest.raises(PlanError) as error:
        mobilenet.segments(Plan((), (6, 12)))
    message = str(error.value)
    assert message.startswith("The plan merges spans that cannot be merged: ")
    assert "(0, 6], because it crosses one end of the residual 5 -> 8" in message
    assert "(6, 12], because it crosses one end of the residual 5 -> 8" in message
    assert "(12, 50], because it crosses one end of the residual 11 -> 14" in message
    assert message.endswith("Add cuts there.")


def test_plan_cannot_insert_activations_into_a_network_without_any():
    build = Builder(4, 16)
    build.add(4, activation=None)
    build.add(4, activation=None)
    with pytest.raises(PlanError, match="the network has no activation to copy"):
        build.network("linear").segments(Plan((1,), (1,)))


def test_activation_at_a_barrier_needs_no_cut():
    assert pairs(chain(3, 3, 3, barriers=(2,)).segments(Plan((2,), ()))) == [(0, 2), (2, 3)]


def layer(**change):
    return Layer(**dict(where="conv", shape=shape(4, 4), in_size=(8, 8), out_size=(8, 8)) | change)


def test_layer_with_a_wrong_output_size_is_refused():
    with pytest.raises(
        InvalidValue,
        match=r"conv: for an input of size \(8, 8\), the output of 3x3, 4 -> 4 has size \(8, 8\), not \(7, 8\)",
    ):
        layer(out_size=(7, 8))
    with pytest.raises(InvalidValue, match=r"conv: sizes .* do not fit"):
        layer(in_size=(8,))


def test_backward_skip_is_refused():
    with pytest.raises(InvalidValue, match="The skip add must go forward, found 2 -> 2"):
        Skip(source=2, target=2, where="add")
    with pytest.raises(InvalidValue, match="must go forward"):
        Skip(source=-1, target=2, where="add")


def test_refusal_needs_a_location_a_code_and_a_reason():
    for bad in (("", "code", "why"), ("where", "", "why"), ("where", "code", "")):
        with pytest.raises(InvalidValue, match="needs a location, a code and a reason"):
            Refusal(*bad)
    assert str(Refusal("features.3", "pooling", "it pools", 4)) == "features.3 (position 4): it pools"
    assert str(Refusal("features.3", "pooling", "it pools")) == "features.3: it pools"


@pytest.mark.parametrize("barriers", [(0,), (2,), (1, 1), (-1,)])
def test_invalid_barriers_are_refused(barriers):
    with pytest.raises(InvalidValue, match="Barriers must be ascending positions strictly between 0 and 2"):
        chain(3, 3, barriers=barriers)
    with pytest.raises(InvalidValue, match="Barriers must be ascending"):
        chain(3, 3, 3, barriers=(2, 1))


def test_neighbours_must_fit_unless_a_barrier_separates_them():
    layers = (layer(where="one"), layer(where="two", shape=shape(6, 6)))
    with pytest.raises(InvalidValue, match=r"Layer 2 \(two\) cannot follow layer 1 \(one\): .* Add a barrier at 1\."):
        Network(name="n", layers=layers)
    assert Network(name="n", layers=layers, barriers=(1,)).depth == 2


def test_skip_that_leaves_its_chain_or_kernel_is_refused():
    layers = (layer(), layer(), layer())
    skip = Skip(source=0, target=2, where="add")
    with pytest.raises(InvalidValue, match="The skip add leaves its chain: 0 -> 2"):
        Network(name="n", layers=layers, skips=(skip,), barriers=(1,))
    with pytest.raises(InvalidValue, match="The skip add leaves its chain: 0 -> 4"):
        Network(name="n", layers=layers, skips=(Skip(source=0, target=4, where="add"),))
    wide = Skip(source=0, target=1, where="add", projection=shape(4, 4, kernel=5))
    with pytest.raises(InvalidValue, match="The skip add cannot be folded into the kernel of its branch"):
        Network(name="n", layers=layers, skips=(wide,))


def test_printed_network_has_a_line_per_layer():
    build = Builder(4, 16)
    build.add(8, "relu6", kernel=3, stride=2)
    build.add(8, None, kernel=1)
    build.skip(1, projection=shape(8, 8, kernel=1))
    build.add(8, "relu6", kernel=3)
    reasons = (
        Refusal("pool", "pooling", "it pools", 2),
        *(Refusal(f"se{n}", "multiplication", "it multiplies") for n in range(5)),
    )
    lines = str(build.network("Tiny", barriers=(2,), refusals=reasons)).splitlines()
    assert (
        lines[0] == "Tiny: 3 layers, 2 activations, 1 skip, 1 barrier; 3 spans in the paper's space, 4 in the full one"
    )
    assert lines[2].split() == ["l", "layer", "convolution", "in", "activation", "note"]
    assert lines[4].split() == ["1", "conv1", "3x3", "/2,", "4", "->", "8", "16x16", "relu6"]
    assert lines[5].endswith("8x8    -           + 1 through 1x1, 8 -> 8; barrier (pooling)")
    assert lines[6].split()[:2] == ["3", "conv3"]
    assert lines[8] == "What does not merge, and why:"
    assert lines[9] == "  multiplication x5: it multiplies [se0, se1, se2 and 2 more]"
    assert lines[10] == "  pooling x1: it pools [pool]"


def test_places_of_refusals_are_counted_once():
    build = Builder(4, 16)
    build.add(8)
    reasons = tuple(Refusal("cat", "concatenation", "it concatenates") for _ in range(6))
    assert "  concatenation x6: it concatenates [cat]" in str(build.network("Dense", refusals=reasons)).splitlines()


def test_printed_network_without_anything_to_merge():
    empty = Network(name="MLP", layers=())
    assert str(empty) == "MLP: nothing to merge: no convolution of this network can be a layer"
    assert (empty.depth, empty.spans(), empty.vanilla) == (0, (), Plan((), ()))
    single = chain(3, 3, barriers=(1,))
    assert str(single).splitlines()[0].endswith("; nothing to merge: every chain has a single layer")
    assert repr(single).startswith("<Network chain: 2 layers, 2 activations, 0 skips, 1 barrier; 2 spans")
