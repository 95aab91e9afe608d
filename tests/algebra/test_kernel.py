"""Composed kernels, compared with a direct convolution in NumPy that shares no code with the package."""

from itertools import product

import numpy as np
import pytest
import torch

from depthfold.algebra import Kernel, NormStatistics, fold_norm
from depthfold.core import ConvShape


def direct(x, kernel, pad=None):
    """Convolve x[channels, *size] by definition, one output and one tap at a time."""
    shape = kernel.shape
    w, b = kernel.weight.numpy(), kernel.bias.numpy()
    x = np.pad(x, [(0, 0), *(shape.padding if pad is None else pad)])
    size = [(n - e) // s + 1 for n, e, s in zip(x.shape[1:], shape.extent, shape.stride, strict=True)]
    out = np.zeros((shape.out_channels, *size))
    per_in, per_out = shape.in_channels // shape.groups, shape.out_channels // shape.groups
    for o in range(shape.out_channels):
        group = o // per_out
        channels = slice(group * per_in, (group + 1) * per_in)
        for index in product(*map(range, size)):
            total = b[o]
            for tap in product(*map(range, shape.kernel)):
                at = tuple(n * s + t * d for n, s, t, d in zip(index, shape.stride, tap, shape.dilation, strict=True))
                total += w[(o, slice(None), *tap)] @ x[(channels, *at)]
            out[(o, *index)] = total
    return out


def make(rng, ins, outs, kernel, stride=None, padding=None, dilation=None, groups=1):
    dims = len(kernel)
    shape = ConvShape(
        in_channels=ins,
        out_channels=outs,
        kernel=kernel,
        stride=stride or (1,) * dims,
        padding=padding or ((0, 0),) * dims,
        dilation=dilation or (1,) * dims,
        groups=groups,
    )
    weight = rng.standard_normal((outs, ins // groups, *kernel))
    return Kernel(shape, torch.from_numpy(weight), torch.from_numpy(rng.standard_normal(outs)))


def moved(x, first, second):
    """Compute two consecutive convolutions with all padding at the front, like the rewritten network."""
    front = first.shape.then(second.shape).padding
    return direct(direct(x, first, pad=front), second, pad=((0, 0),) * first.shape.dims)


PAIRS = {
    "1x1 then 3x3": dict(a=dict(kernel=(1, 1)), b=dict(kernel=(3, 3), padding=((1, 1), (1, 1)))),
    "3x3 then 3x3": dict(a=dict(kernel=(3, 3), padding=((1, 1),) * 2), b=dict(kernel=(3, 3), padding=((1, 1),) * 2)),
    "stride 2 then 3x3": dict(a=dict(kernel=(3, 3), stride=(2, 2), padding=((1, 1),) * 2), b=dict(kernel=(3, 3))),
    "stride 2x3 then stride 2": dict(
        a=dict(kernel=(2, 3), stride=(2, 3)), b=dict(kernel=(3, 2), stride=(2, 1), padding=((1, 0), (0, 2)))
    ),
    "non-square": dict(a=dict(kernel=(1, 3)), b=dict(kernel=(3, 1), padding=((1, 2), (0, 0)))),
    "one axis alone": dict(a=dict(kernel=(1, 3), padding=((0, 0), (1, 1))), b=dict(kernel=(3, 2), dilation=(2, 1))),
    "1x1 in groups, then 3x3": dict(a=dict(kernel=(1, 1), groups=6), b=dict(kernel=(3, 3), groups=4)),
    "dilated then 1x1": dict(a=dict(kernel=(3, 3), dilation=(2, 3)), b=dict(kernel=(1, 1))),
    "1x1 then dilated": dict(a=dict(kernel=(1, 1), stride=(2, 2)), b=dict(kernel=(3, 2), dilation=(2, 2))),
    "dilated alike": dict(a=dict(kernel=(3, 3), dilation=(2, 2)), b=dict(kernel=(2, 2), dilation=(2, 2))),
    "dilated 2 then 3": dict(a=dict(kernel=(2, 3), dilation=(2, 2)), b=dict(kernel=(2, 2), dilation=(3, 1))),
    "depth-wise then dense": dict(a=dict(kernel=(3, 3), groups=12), b=dict(kernel=(1, 1))),
    "dense then depth-wise": dict(a=dict(kernel=(1, 1)), b=dict(kernel=(3, 3), groups=12)),
    "depth-wise twice": dict(a=dict(kernel=(3, 3), groups=12), b=dict(kernel=(3, 2), groups=12)),
    "groups 2 then 4": dict(a=dict(kernel=(2, 2), groups=2), b=dict(kernel=(2, 2), groups=4)),
    "groups 6 then 3": dict(a=dict(kernel=(2, 2), groups=6), b=dict(kernel=(2, 2), groups=3)),
    "groups 4 then 6": dict(a=dict(kernel=(2, 1), groups=4), b=dict(kernel=(1, 2), groups=6)),
    "groups 3 then 4": dict(a=dict(kernel=(2, 1), groups=3), b=dict(kernel=(1, 2), groups=4)),
    "1-D": dict(a=dict(kernel=(3,), stride=(2,), padding=((1, 1),)), b=dict(kernel=(5,), padding=((2, 2),))),
    "3-D": dict(a=dict(kernel=(2, 1, 2), stride=(1, 2, 1), padding=((1, 0), (0, 0), (1, 1))), b=dict(kernel=(1, 2, 2))),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_composition_equals_two_consecutive_convolutions(pair):
    rng = np.random.default_rng(3)
    first = make(rng, 12, 12, **PAIRS[pair]["a"])
    second = make(rng, 12, 12, **PAIRS[pair]["b"])
    size = {1: (17,), 2: (11, 10), 3: (5, 6, 4)}[first.shape.dims]
    x = rng.standard_normal((12, *size))
    merged = first.then(second)
    expected = moved(x, first, second)
    np.testing.assert_allclose(direct(x, merged), expected, rtol=0, atol=1e-12 * np.abs(expected).max())


def test_kernel_after_a_stride_grows_and_groups_are_kept_if_possible():
    rng = np.random.default_rng(0)
    strided = make(rng, 12, 12, (3, 3), stride=(2, 2), groups=12)
    assert strided.then(make(rng, 12, 12, (3, 3), groups=12)).shape.kernel == (7, 7)
    assert strided.then(make(rng, 12, 12, (3, 3), groups=12)).shape.depthwise
    assert strided.then(make(rng, 12, 24, (1, 1), groups=4)).shape.groups == 4
    assert strided.then(make(rng, 12, 24, (1, 1))).shape.groups == 1
    dilated = make(rng, 12, 12, (3, 3), dilation=(2, 2)).then(make(rng, 12, 12, (3, 3), dilation=(2, 2)))
    assert (dilated.shape.kernel, dilated.shape.dilation) == ((5, 5), (2, 2))


SKIPS = {
    "identity": dict(main=dict(kernel=(3, 3), padding=((1, 1), (1, 1))), skip=None),
    "identity into depth-wise": dict(main=dict(kernel=(3, 3), padding=((1, 1), (1, 1)), groups=6), skip=None),
    "identity off the grid": dict(main=dict(kernel=(2, 2), dilation=(2, 2), padding=((1, 1), (1, 1))), skip=None),
    "1x1 projection": dict(
        main=dict(kernel=(7, 7), stride=(2, 2), padding=((3, 3),) * 2), skip=dict(kernel=(1, 1), stride=(2, 2))
    ),
    "grouped projection": dict(
        main=dict(kernel=(3, 5), padding=((1, 1), (2, 2)), groups=2),
        skip=dict(kernel=(3, 3), padding=((1, 1), (1, 1)), groups=3),
    ),
}


@pytest.mark.parametrize("case", SKIPS)
def test_skip_is_added_to_the_kernel(case):
    rng = np.random.default_rng(5)
    main = make(rng, 6, 6, **SKIPS[case]["main"])
    skip = SKIPS[case]["skip"]
    kernel = Kernel.identity(6, 2, main.weight) if skip is None else make(rng, 6, 6, **skip)
    x = rng.standard_normal((6, 9, 8))
    alone = direct(x, main)
    expected = alone + (x if skip is None else direct(x, kernel))
    np.testing.assert_allclose(direct(x, main.plus(kernel)), expected, rtol=0, atol=1e-12 * np.abs(expected).max())
    np.testing.assert_array_equal(direct(x, main), alone)  # the kernel itself is not changed without `reuse`
    reused = main.plus(kernel, reuse=True)
    np.testing.assert_allclose(direct(x, reused), expected, rtol=0, atol=1e-12 * np.abs(expected).max())


def test_norm_is_folded_with_its_eps_and_without_affine():
    rng = np.random.default_rng(1)
    kernel = make(rng, 3, 4, (3, 3))
    mean, var, weight, bias = (torch.from_numpy(rng.uniform(0.1, 2, 4)) for _ in range(4))
    x = rng.standard_normal((3, 6, 6))
    for affine in (True, False):
        norm = NormStatistics(mean, var, weight if affine else None, bias if affine else None, eps=0.1)
        expected = torch.nn.functional.batch_norm(
            torch.from_numpy(direct(x, kernel))[None], mean, var, norm.weight, norm.bias, eps=0.1
        )[0].numpy()
        np.testing.assert_allclose(direct(x, fold_norm(kernel, norm)), expected, rtol=0, atol=1e-12)
