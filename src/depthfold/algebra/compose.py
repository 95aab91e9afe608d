"""The weight of two consecutive convolutions as one.

Tap k2 of the second kernel reads the output of the first kernel k2 steps further on. So the merged kernel is a sum over
the taps of the second kernel, each with a shifted copy of the first kernel:

    merged[o, i, k1 * d1 + k2 * s1 * d2] += second[o, c, k2] * first[c, i, k1]

where d1 and d2 are the dilations and s1 is the stride of the first. The code follows this definition tap by tap; the
sum over the channels c is a matrix product. If no two pairs of taps coincide, as with a 1x1 kernel, one product is
enough.
"""

from __future__ import annotations

from itertools import product
from math import gcd
from typing import Any

import torch
from torch import Tensor

from depthfold.core import ConvShape


def compose_weights(first: Tensor, one: ConvShape, second: Tensor, two: ConvShape) -> Tensor:
    """Return the weight of the convolution `one.then(two)` from the weights `first` and `second`."""
    merged = one.then(two)
    first = spread(first, one.dilation, merged.dilation)
    left, right, target = _group(first, one.groups, second, two.groups)
    if all(1 in sizes for sizes in zip(one.kernel, two.kernel, strict=True)):
        return _ungroup(_sum(right, left), merged)
    out = first.new_zeros((*target, *merged.kernel))
    steps = [
        s * d // grid if k > 1 else 0
        for s, d, grid, k in zip(one.stride, two.dilation, merged.dilation, two.kernel, strict=True)
    ]
    for tap in product(*(range(k) for k in two.kernel)):
        shifted = (slice(t * step, t * step + size) for t, step, size in zip(tap, steps, first.shape[2:], strict=True))
        window: Any = (..., *shifted)
        weights: Any = (..., *(slice(t, t + 1) for t in tap))
        out[window] += _sum(right[weights], left)
    return _ungroup(out, merged)


def _sum(second: Tensor, first: Tensor) -> Tensor:
    """Sum over the channels in between. Along every axis, one of the two kernels has a single tap."""
    return torch.einsum("guoc...,guci...->guoi...", second, first)


def spread(weight: Tensor, dilation: tuple[int, ...], grid: tuple[int, ...]) -> Tensor:
    """Return the same taps on a finer grid, with zeros between them."""
    factors = [d // g if k > 1 else 1 for d, g, k in zip(dilation, grid, weight.shape[2:], strict=True)]
    if max(factors) == 1:
        return weight
    size = [(k - 1) * f + 1 for k, f in zip(weight.shape[2:], factors, strict=True)]
    out = weight.new_zeros((*weight.shape[:2], *size))
    strided: Any = (..., *(slice(None, None, f) for f in factors))
    out[strided] = weight
    return out


def regroup(weight: Tensor, groups: int, fewer: int) -> Tensor:
    """Return the weight of a convolution with `groups` groups as one with `fewer`, with zeros between groups."""
    if groups == fewer:
        return weight
    ratio = groups // fewer
    outs, ins = weight.shape[0] // groups, weight.shape[1]
    out = weight.new_zeros((fewer, ratio, outs, ratio, ins, *weight.shape[2:]))
    blocks = weight.reshape(fewer, ratio, outs, ins, *weight.shape[2:])
    out.diagonal(dim1=1, dim2=3).copy_(blocks.movedim(1, -1))
    return out.reshape(fewer * ratio * outs, ratio * ins, *weight.shape[2:])


def _group(first: Tensor, g1: int, second: Tensor, g2: int) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Return both weights with leading axes (group, subgroup), so that one einsum multiplies matching channels.

    If the second convolution has more groups, each of them reads a part of one group of the first. If the first has
    more, each group of the second reads several whole groups. Groups that are not nested are joined first.
    """
    groups = gcd(g1, g2)
    if groups not in (g1, g2):
        first, g1 = regroup(first, g1, groups), groups
    taps1, taps2 = first.shape[2:], second.shape[2:]
    middle, ins, outs = first.shape[0], first.shape[1], second.shape[0]
    if g2 >= g1:
        sub = g2 // g1
        left = first.reshape(groups, sub, middle // g2, ins, *taps1)
        right = second.reshape(groups, sub, outs // g2, middle // g2, *taps2)
        return left, right, (groups, sub, outs // g2, ins)
    sub = g1 // g2
    left = first.reshape(groups, sub, middle // g1, ins, *taps1)
    right = second.reshape(groups, outs // g2, sub, middle // g1, *taps2).transpose(1, 2)
    return left, right, (groups, sub, outs // g2, ins)


def _ungroup(out: Tensor, merged: ConvShape) -> Tensor:
    """Convert (group, subgroup, out, in) to the layout of a convolution weight."""
    groups, _, outs, _ = out.shape[:4]
    if groups * outs == merged.out_channels:  # the subgroups divide the input channels
        out = out.transpose(1, 2)
    return out.reshape(merged.out_channels, merged.in_channels // groups, *merged.kernel)
