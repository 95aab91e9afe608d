"""Spans and flagged spans, the keys of the tables."""

import pytest

from depthfold.core import FlaggedSpan, Span
from depthfold.errors import DepthfoldError, InvalidValue


def test_span_contains_the_layers_after_i_up_to_j():
    span = Span(2, 5)
    assert list(span.layers) == [3, 4, 5]
    assert list(span.inner) == [3, 4]
    assert len(span) == 3
    assert str(span) == "(2, 5]"


def test_span_of_one_layer_has_no_inner_position():
    assert list(Span(0, 1).inner) == []


def test_contains():
    assert Span(2, 5).contains(Span(2, 5))
    assert Span(2, 5).contains(Span(3, 4))
    assert not Span(2, 5).contains(Span(1, 4))
    assert not Span(2, 5).contains(Span(4, 6))


def test_spans_are_ordered_by_i_and_then_by_j_and_can_be_keys():
    assert sorted([Span(1, 2), Span(0, 9), Span(0, 3)]) == [Span(0, 3), Span(0, 9), Span(1, 2)]
    assert {Span(0, 3): "first"}[Span(0, 3)] == "first"


@pytest.mark.parametrize("ends", [(3, 3), (4, 2), (-1, 2)])
def test_invalid_ends_are_refused(ends):
    with pytest.raises(InvalidValue, match="needs positions 0 <= i < j, found i="):
        Span(*ends)
    with pytest.raises(InvalidValue, match="needs positions 0 <= i < j, found i="):
        FlaggedSpan(*ends, False, True)


def test_flagged_span_reads_0_and_1_as_flags():
    flagged = FlaggedSpan(1, 4, 1, 0)
    assert (flagged.a, flagged.b) == (True, False)
    assert flagged == FlaggedSpan(1, 4, True, False)
    assert flagged.span == Span(1, 4)
    assert str(flagged) == "(1, 4], flags 10"


@pytest.mark.parametrize("flag", [2, None, "1"])
def test_invalid_flags_are_refused(flag):
    with pytest.raises(InvalidValue, match=r"flag a of a span must be 0 or 1, found"):
        FlaggedSpan(0, 1, flag, True)
    with pytest.raises(InvalidValue, match=r"flag b of a span must be 0 or 1, found"):
        FlaggedSpan(0, 1, True, flag)


def test_spans_are_frozen():
    with pytest.raises(AttributeError):
        Span(0, 1).i = 3


def test_invalid_value_is_a_depthfold_error_and_a_value_error():
    assert issubclass(InvalidValue, DepthfoldError)
    assert issubclass(InvalidValue, ValueError)
