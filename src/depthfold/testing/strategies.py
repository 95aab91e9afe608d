"""Hypothesis strategies for random small CNNs. They need `pip install hypothesis`."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from hypothesis import strategies as st

from depthfold.testing.networks import Beside, Block, Branches, Conv, NetworkSpec, Pool

_STYLES = ("module", "function", "method", None)
_SIZES = {1: (23,), 2: (15, 14), 3: (9, 8, 7)}


@st.composite
def convs(draw: Any, dims: int, channels: int, *, keeps_size: bool = False, strided: bool = True) -> Conv:
    """Draw a convolution. With `keeps_size`, its output has size ceil(size / stride), as residual blocks need."""
    kernel = tuple(draw(st.sampled_from((1, 3) if keeps_size else (1, 2, 3))) for _ in range(dims))
    dilation = tuple(draw(st.sampled_from((1, 1, 2))) for _ in range(dims))
    stride = tuple(draw(st.sampled_from((1, 1, 1, 2))) if strided else 1 for _ in range(dims))
    half = tuple(((k - 1) * d // 2,) * 2 for k, d in zip(kernel, dilation, strict=True))
    same = not keeps_size and max(stride) == 1 and draw(st.sampled_from((True, False, False)))
    if same:
        totals = [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
        padding = tuple((t // 2, t - t // 2) for t in totals)
    elif keeps_size:
        padding = half
    else:
        padding = tuple((draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in range(dims))
    out = draw(st.sampled_from((2, 4, 6)))
    groups = draw(st.sampled_from([g for g in (1, 1, 2, 4, 6) if channels % g == 0 and out % g == 0]))
    return Conv(
        out=out,
        kernel=kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        bias=draw(st.booleans()),
        eps=draw(st.sampled_from((1e-5, 1e-1, None))),
        factor=draw(st.sampled_from((1.0, 1.0, 0.3, -1.0))),
        activation=draw(st.sampled_from(_STYLES)),
        same=same,
        beside=draw(_beside(channels, out, stride, dilation)) if keeps_size else (),
        nested=draw(st.booleans()),
    )


def _beside(
    channels: int, out: int, stride: tuple[int, ...], dilation: tuple[int, ...]
) -> st.SearchStrategy[tuple[Beside, ...]]:
    """Return a strategy for the branches parallel to a convolution that keeps the size."""
    kinds: list[Beside] = ["point", "twin"]
    if max(dilation) == 1:
        kinds += ["pool", "pool and point"] if channels == out else ["pool and point"]
    if max(stride) == 1 and channels == out:
        kinds += ["identity", "norm"]
    some = st.lists(st.sampled_from(kinds), max_size=3, unique=True).map(tuple)
    return st.one_of(st.just(()), some)


@st.composite
def residuals(draw: Any, dims: int, channels: int, depth: int = 1) -> Block:
    """Draw a residual block, which may contain another. Its branch ends without an activation."""
    skip = draw(st.sampled_from(("identity", "projection")))
    items: list[Conv | Block] = []
    now, stride = channels, (1,) * dims
    for n in range(count := draw(st.integers(1, 3))):
        if depth and draw(st.sampled_from((True, False, False))):
            inner = draw(residuals(dims, now, depth - 1))
            items.append(inner)
            now, stride = out_channels(inner, now), _multiply(stride, inner.stride or (1,) * dims)
        conv = draw(convs(dims, now, keeps_size=True, strided=skip == "projection"))
        if n == count - 1:
            conv = replace(conv, activation=None)
            if skip == "identity" and conv.out != channels:
                groups = conv.groups if channels % conv.groups == 0 else 1
                conv = replace(conv, out=channels, groups=groups, beside=())
        items.append(conv)
        now, stride = conv.out, _multiply(stride, conv.stride)
    if skip == "identity" and prod(stride) != 1:
        skip = "projection"  # an inner block has a stride
    return Block(items=tuple(items), skip=skip, stride=stride, activation=draw(st.sampled_from(_STYLES)))


@st.composite
def sequences(draw: Any, dims: int, channels: int, longest: int = 3) -> Block:
    """Draw a sequence of convolutions without a residual connection."""
    items: list[Conv | Block] = []
    for _ in range(draw(st.integers(1, longest))):
        conv = draw(convs(dims, channels, keeps_size=draw(st.booleans())))
        items.append(conv)
        channels = conv.out
    return Block(items=tuple(items))


@st.composite
def branches(draw: Any, dims: int, channels: int) -> Branches:
    """Draw two parallel sequences with the same output size, for concatenation."""

    def branch() -> Block:
        items: list[Conv | Block] = []
        now = channels
        for _ in range(draw(st.integers(1, 2))):
            conv = draw(convs(dims, now, keeps_size=True, strided=False))
            items.append(conv)
            now = conv.out
        return Block(items=tuple(items))

    return Branches(left=branch(), right=branch())


@st.composite
def network_specs(draw: Any) -> NetworkSpec:
    """Draw a small CNN of one to four parts in one, two or three dimensions."""
    dims = draw(st.sampled_from((1, 2, 2, 2, 3)))
    channels = first = draw(st.sampled_from((2, 4)))
    parts: list[Block | Branches | Pool] = []
    for _ in range(draw(st.integers(1, 4))):
        rest = (residuals(dims, channels), branches(dims, channels), st.just(Pool()))
        part = draw(st.one_of(sequences(dims, channels), residuals(dims, channels), *rest))
        parts.append(part)
        channels = out_channels(part, channels)
    return NetworkSpec(channels=first, size=_SIZES[dims], parts=tuple(parts))


def out_channels(part: Block | Branches | Pool | Conv, channels: int) -> int:
    if isinstance(part, Conv):
        return part.out
    if isinstance(part, Branches):
        return out_channels(part.left, channels) + out_channels(part.right, channels)
    if isinstance(part, Block):
        for item in part.items:
            channels = out_channels(item, channels)
    return channels


def _multiply(one: tuple[int, ...], two: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a * b for a, b in zip(one, two, strict=True))
