"""What is left of a segment after layers and branches are dropped."""

import re
from dataclasses import replace

import pytest

from depthfold.core import ConvShape, Drops, Network, Plan, Segment, Skip, Span
from depthfold.errors import PlanError
from structures import chain, shape


def residuals(*targets: int) -> Network:
    """Return five layers with identity skips from position 1 to these positions."""
    skips = tuple(Skip(source=1, target=target, where=f"add{target}", projection=None) for target in targets)
    return replace(chain(3, 3, 3, 3, 3), skips=skips)


def test_layers_of_dropped_branches_are_not_kept() -> None:
    dropped = Drops([1, 3], [Span(1, 3)])
    assert dropped.kept(Span(0, 5)) == (4, 5)
    assert dropped.kept(Span(0, 3)) == ()


def test_branch_covers_itself_and_what_is_inside() -> None:
    dropped = Drops([4], [Span(1, 3)])
    assert [dropped.covers(Span(*ends)) for ends in ((1, 3), (2, 3), (1, 4), (3, 4))] == [True, True, False, False]


def test_shape_of_the_only_kept_layer_is_unchanged() -> None:
    network = chain(3, 1, 3)
    point = network.layers[1]
    wide = replace(network, layers=(network.layers[0], replace(point, shape=DILATED), network.layers[2]))
    assert wide.merged_shape(Span(0, 3), Drops([1, 3])) == wide.merged_shape(Span(1, 2)) == DILATED


DILATED = ConvShape(
    in_channels=4, out_channels=4, kernel=(1, 1), stride=(1, 1), padding=((0, 0), (0, 0)), dilation=(2, 2)
)


@pytest.mark.parametrize(
    ("cuts", "dropped"),
    [((1, 3, 4), Drops([2, 3])), ((1, 4), Drops([2, 3, 4])), ((1, 4), Drops([4], [Span(1, 3)]))],
)
def test_segment_that_only_adds_a_value_to_itself_is_refused(cuts: tuple[int, ...], dropped: Drops) -> None:
    network = residuals(3) if 3 in cuts else residuals(3, 4)
    message = r"the segment \(1, [34]\], so that only the addition of its residual would be left\. Drop the branch"
    with pytest.raises(PlanError, match=message):
        network.segments(Plan((), cuts, dropped))


def test_segment_that_only_adds_a_projection_is_refused_with_another_fix() -> None:
    network = replace(residuals(3), skips=(Skip(source=1, target=3, where="add", projection=shape(4, 4, 1)),))
    message = r"only the addition of its residual would be left\. Remove the cut before or after it, or keep a layer\.$"
    with pytest.raises(PlanError, match=message):
        network.segments(Plan((), (1, 3), Drops([2, 3])))
    for plan in (Plan((), (3,), Drops([2, 3])), Plan((), (1,), Drops([2, 3])), Plan((), (1, 3), Drops([2]))):
        assert len(network.segments(plan)) == len(plan.cuts) + 1


@pytest.mark.parametrize(
    ("cuts", "dropped"),
    [
        ((1, 4), Drops([2, 3])),  # layer 4 is left
        ((), Drops([2, 3, 4])),  # layers 1 and 5 are left
        ((1, 4), Drops([], [Span(1, 4)])),  # the segment is empty
        ((1, 2, 3, 4), Drops([2, 3, 4])),  # the additions are not inside a segment
    ],
)
def test_other_segments_without_layers_are_allowed(cuts: tuple[int, ...], dropped: Drops) -> None:
    network = residuals(3, 4)
    assert len(network.segments(Plan((), cuts, dropped))) == len(cuts) + 1


@pytest.mark.parametrize(
    ("dropped", "text"),
    [
        (Drops(), "nothing"),
        (Drops([3]), "layer 3"),
        (Drops([5, 3]), "layers 3, 5"),
        (Drops(branches=[Span(3, 5)]), "the branch (3, 5]"),
        (Drops([2], [Span(5, 7), Span(3, 5)]), "layer 2 and the branches (3, 5], (5, 7]"),
    ],
)
def test_drops_are_printed_in_plain_words(dropped: Drops, text: str) -> None:
    assert str(dropped) == text
    assert str(Plan([1], [1], dropped)) == f"Plan: activations at 1; cuts at 1{f'; drops {text}' if dropped else ''}"


def test_row_of_a_segment_says_what_is_left() -> None:
    part = Segment(span=Span(1, 3), times=(0.5, 0.75), replaced=2.0, shape=shape(8, 8), dropped=Drops([2]))
    assert part.row(True) == ("2-3", "3x3, 8 -> 8, without layer 2", "0.75", "2", "1.25")
    empty = Segment(span=Span(1, 3), times=(0.0, 0.25), replaced=2.0, dropped=Drops(branches=[Span(1, 3)]))
    assert empty.row(False)[:3] == ("2-3", "nothing, all dropped", "0")
    assert empty.row(True)[:3] == ("2-3", "only an activation, all dropped", "0.25")


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (99, "but the network has 5 layers"),
        (4, "which has a parallel branch"),
        (5, "which changes the number of channels or the size"),
    ],
)
def test_layer_that_cannot_be_dropped_is_refused_with_the_reason(layer: int, why: str) -> None:
    network = chain(3, 3, 3, 3, 3)
    parallel = Skip(source=3, target=4, where="add", projection=shape(4, 4, kernel=1))
    wider = replace(network.layers[4], shape=shape(4, 8))
    network = replace(network, layers=(*network.layers[:4], wider), skips=(parallel,))
    message = f"The plan drops layer {layer}, {why}. Drop only layers of network.droppable_layers."
    with pytest.raises(PlanError, match=re.escape(message)):
        network.segments(Plan((), (), Drops([2, layer])))
