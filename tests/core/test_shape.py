"""Shapes of convolutions, and their composition."""

from itertools import product

import pytest

from depthfold.core import ConvShape
from depthfold.errors import InvalidValue
from structures import shape


def taps(kernel, dilation):
    return {k * dilation for k in range(kernel)}


def line(kernel, stride=1, padding=(0, 0), dilation=1):
    return ConvShape(
        in_channels=1,
        out_channels=1,
        kernel=(kernel,),
        stride=(stride,),
        padding=(padding,),
        dilation=(dilation,),
        groups=1,
    )


ONES = list(product((1, 2, 3), (1, 2, 3), (1, 2, 3)))


@pytest.mark.parametrize("first", ONES)
def test_merged_kernel_contains_all_taps_on_the_coarsest_grid(first):
    k1, s1, d1 = first
    for k2, s2, d2 in ONES:
        merged = line(k1, s1, (1, 2), d1).then(line(k2, s2, (2, 1), d2))
        reached = {a + s1 * b for a in taps(k1, d1) for b in taps(k2, d2)}
        own = taps(merged.kernel[0], merged.dilation[0])
        assert reached <= own
        assert max(reached) == max(own)
        # No coarser grid contains them.
        assert not any(
            reached <= set(range(0, max(reached) + 1, d)) for d in range(merged.dilation[0] + 1, 20) if max(reached)
        )
        assert merged.stride == (s1 * s2,)
        assert merged.padding == ((1 + s1 * 2, 2 + s1 * 1),)


def test_kernel_after_a_stride_grows_by_the_stride():
    assert shape(4, 4, kernel=3, stride=2).then(shape(4, 4, kernel=3)).kernel == (7, 7)
    assert shape(4, 4, kernel=3, stride=2).then(shape(4, 4, kernel=1)).kernel == (3, 3)
    assert shape(4, 4, kernel=3).then(shape(4, 4, kernel=5)).kernel == (7, 7)


@pytest.mark.parametrize("size", range(15, 24))
def test_merged_output_has_the_size_of_two_consecutive_convolutions(size):
    for (k1, s1, d1), (k2, s2, d2) in product(ONES[::4], ONES[::5]):
        one, two = line(k1, s1, (1, 0), d1), line(k2, s2, (0, 2), d2)
        # With the padding at the front, the merged output may be larger, but never smaller.
        moved = one.then(two).out_size((size,))
        consecutive = two.out_size(one.out_size((size,)))
        assert moved >= consecutive
        if s1 == 1:
            assert moved == consecutive


def test_groups_are_the_greatest_common_divisor():
    def merged(one, two):
        return shape(12, 12, groups=one).then(shape(12, 12, groups=two)).groups

    assert merged(12, 12) == 12
    assert merged(2, 4) == merged(4, 2) == 2
    assert merged(4, 6) == 2
    assert merged(3, 4) == 1
    assert merged(12, 1) == 1


def test_identity_changes_nothing():
    one = shape(6, 9, kernel=5, stride=2, groups=3)
    assert one.then(ConvShape.identity(9, 2)) == one
    assert ConvShape.identity(6, 2).then(one) == one
    assert ConvShape.identity(6, 2).depthwise


def test_kernel_of_one_tap_has_no_dilation():
    """Otherwise two entries of a table would stand for the same convolution."""
    point = shape(4, 4, 1, dilation=2)
    assert point == shape(4, 4, 1) and line(1, dilation=2).dilation == (1,)
    assert ConvShape.identity(4, 2).then(point) == point.then(ConvShape.identity(4, 2)) == point


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(InvalidValue, match="cannot follow"):
        shape(4, 6).then(shape(4, 4))
    with pytest.raises(InvalidValue, match="cannot follow"):
        shape(1, 1).then(line(3))


def test_offset_is_the_position_of_the_first_tap_of_a_skip():
    assert shape(4, 4, kernel=3).offset(ConvShape.identity(4, 2)) == (1, 1)
    assert shape(4, 4, kernel=7).offset(shape(4, 4, kernel=3)) == (2, 2)
    assert shape(4, 8, kernel=7, stride=2).offset(shape(4, 8, kernel=1, stride=2)) == (3, 3)


@pytest.mark.parametrize(
    "skip",
    [
        shape(4, 4, kernel=1, stride=2),  # another stride
        shape(4, 8, kernel=1),  # other channels
        shape(4, 4, kernel=5),  # larger kernel
        shape(4, 4, kernel=3, padding=0),  # exceeds the kernel
    ],
)
def test_skip_that_does_not_fit_has_no_offset_and_is_refused(skip):
    main = shape(4, 4, kernel=3)
    assert main.offset(skip) is None
    with pytest.raises(InvalidValue, match="cannot be added to"):
        main.plus(skip)


def test_plus_refines_the_grid_and_reduces_groups_only_if_necessary():
    dilated = shape(4, 4, kernel=3, dilation=2)
    assert dilated.plus(ConvShape.identity(4, 2)) == dilated  # the centre is on the grid
    assert dilated.plus(shape(4, 4, kernel=3)).kernel == (5, 5)
    assert dilated.plus(shape(4, 4, kernel=3)).dilation == (1, 1)
    even = shape(4, 4, kernel=2, dilation=2, padding=1)
    assert (even.plus(ConvShape.identity(4, 2)).kernel, even.plus(ConvShape.identity(4, 2)).dilation) == (
        (3, 3),
        (1, 1),
    )
    assert shape(12, 12, groups=4).plus(ConvShape.identity(12, 2)).groups == 4
    assert shape(12, 12, groups=12).plus(ConvShape.identity(12, 2)).depthwise
    assert shape(12, 12, groups=4).plus(shape(12, 12, kernel=1, groups=6)).groups == 2


def test_out_size_extent_and_parameters():
    one = shape(6, 12, kernel=3, stride=2, dilation=2, groups=3)
    assert one.extent == (5, 5)
    assert one.out_size((11, 12)) == (6, 6)
    assert one.parameters == 12 * (2 * 9 + 1)
    assert one.symmetric
    assert not line(3, padding=(0, 1)).symmetric


@pytest.mark.parametrize(
    ("own", "text"),
    [
        (shape(3, 8), "3x3, 3 -> 8"),
        (shape(32, 64, stride=2), "3x3 /2, 32 -> 64"),
        (shape(8, 8, groups=8, kernel=5), "5x5, 8 -> 8, depth-wise"),
        (shape(8, 16, groups=4, kernel=1), "1x1, 8 -> 16, 4 groups"),
        (shape(1, 1), "3x3, 1 -> 1"),
        (shape(4, 4, dilation=2), "3x3 dilated 2, 4 -> 4"),
        (line(3, stride=2), "3 /2, 1 -> 1"),
    ],
)
def test_text_describes_the_convolution(own, text):
    assert str(own) == text


def test_text_of_strides_that_differ_by_dimension():
    own = ConvShape(
        in_channels=2,
        out_channels=2,
        kernel=(1, 3),
        stride=(1, 2),
        padding=((0, 0), (1, 1)),
        dilation=(1, 3),
        groups=1,
    )
    assert str(own) == "1x3 dilated 1x3 /1x2, 2 -> 2"


GOOD = dict(in_channels=4, out_channels=4, kernel=(3,), stride=(1,), padding=((1, 1),), dilation=(1,), groups=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(stride=(1, 1)), "must all have one, two or three dimensions"),
        (dict(kernel=(), stride=(), padding=(), dilation=()), "must all have one, two or three dimensions"),
        (
            dict(kernel=(1,) * 4, stride=(1,) * 4, padding=((0, 0),) * 4, dilation=(1,) * 4),
            "must all have one, two or three dimensions",
        ),
        (dict(kernel=(0,)), "must be positive"),
        (dict(stride=(0,)), "must be positive"),
        (dict(dilation=(-1,)), "must be positive"),
        (dict(groups=0), "must be positive"),
        (dict(in_channels=0), "must be positive"),
        (dict(padding=((-1, 0),)), "Padding must not be negative"),
        (dict(groups=3), "3 groups do not divide 4 input and 4 output channels"),
    ],
)
def test_invalid_shapes_are_refused(change, message):
    ConvShape(**GOOD)
    with pytest.raises(InvalidValue, match=message):
        ConvShape(**GOOD | change)
