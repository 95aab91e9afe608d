"""Shapes of convolutions, and the rule for composing two of them. No weights."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod
from typing import Self

from depthfold.errors import InvalidValue

# Padding that depends on the size of the map, fixed at the traced size: at which other sizes it is the same.


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRule:
    """The sizes of one dimension at which a padding is the traced one: those between `smallest` and `largest` that
    leave one of the `remainders` when divided by `period`."""

    period: int
    remainders: tuple[int, ...]
    smallest: int
    largest: int

    def __post_init__(self) -> None:
        if self.period < 1 or not self.remainders or self.smallest > self.largest:
            raise InvalidValue(f"A size rule needs a period >= 1, a remainder and a range of sizes, found {self!r}.")

    def allows(self, size: int) -> bool:
        return self.smallest <= size <= self.largest and size % self.period in self.remainders

    def __str__(self) -> str:
        if self.smallest == self.largest:
            return str(self.smallest)
        between = f"{self.smallest} to {self.largest}"
        if self.period == len(self.remainders):
            return between
        if self.period == 2:
            return f"{'odd' if self.remainders == (1,) else 'even'}, {between}"
        return f"{' or '.join(map(str, self.remainders))} modulo {self.period}, {between}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPadding:
    """A module that pads by the size of its input: `size` is the traced one, `rules` hold for each dimension."""

    where: str
    size: tuple[int, ...]
    rules: tuple[SizeRule, ...]

    def __str__(self) -> str:
        traced = "x".join(map(str, self.size))
        return f"{self.where} (traced at {traced}; allowed sizes: {' x '.join(map(str, self.rules))})"


Padding = tuple[tuple[int, int], ...]  # (before, after) for every dimension

# Weights of the largest convolution that we compose: 1 GiB in float64. The full search space of a wide network holds
# spans of many times that, and none of them is faster than the layers that it replaces.
LARGEST = 2**27


def as_pad_argument(padding: Padding) -> tuple[int, ...]:
    """The widths as PyTorch's pad functions take them: one after another, the last dimension first."""
    return tuple(width for pair in reversed(padding) for width in pair)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvShape:
    """The shape of one convolution in 1, 2 or 3 dimensions.

    `padding` is (before, after) for every dimension, because the padding of a merged convolution need not be
    symmetric.
    """

    in_channels: int
    out_channels: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Padding
    dilation: tuple[int, ...]
    groups: int = 1

    def __post_init__(self) -> None:
        dims = len(self.kernel)
        if dims not in (1, 2, 3) or not dims == len(self.stride) == len(self.padding) == len(self.dilation):
            raise InvalidValue(
                f"Kernel {self.kernel}, stride {self.stride}, padding {self.padding} and dilation {self.dilation} "
                "must all have one, two or three dimensions."
            )
        if min(self.kernel + self.stride + self.dilation + (self.groups, self.in_channels, self.out_channels)) < 1:
            raise InvalidValue(f"Channels, kernel, stride, dilation and groups must be positive, found {self}.")
        if any(before < 0 or after < 0 for before, after in self.padding):
            raise InvalidValue(f"Padding must not be negative, found {self.padding}.")
        if self.in_channels % self.groups or self.out_channels % self.groups:
            raise InvalidValue(
                f"{self.groups} groups do not divide {self.in_channels} input and {self.out_channels} output channels."
            )

    @classmethod
    def identity(cls, channels: int, dims: int) -> Self:
        """The convolution that changes nothing: one tap per channel."""
        ones = (1,) * dims
        return cls(
            in_channels=channels,
            out_channels=channels,
            kernel=ones,
            stride=ones,
            padding=((0, 0),) * dims,
            dilation=ones,
            groups=channels,
        )

    @property
    def dims(self) -> int:
        return len(self.kernel)

    @property
    def depthwise(self) -> bool:
        return self.groups == self.in_channels == self.out_channels

    @property
    def extent(self) -> tuple[int, ...]:
        """How far the kernel reaches, dilation included."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilation, strict=True))

    @property
    def symmetric(self) -> bool:
        """Whether a plain convolution layer can hold the padding."""
        return all(before == after for before, after in self.padding)

    @property
    def parameters(self) -> int:
        """Weights and biases of the convolution."""
        return self.out_channels * (self.in_channels // self.groups * prod(self.kernel) + 1)

    @property
    def too_large(self) -> str | None:
        """Why this convolution is too large to be composed, or None if it is not."""
        if self.parameters <= LARGEST:
            return None
        gigabytes = self.parameters * 8 / 2**30
        return f"it would be a convolution {self} of {gigabytes:.1f} GiB in float64, and the limit is 1 GiB"

    def out_size(self, size: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(
            (n + before + after - e) // s + 1
            for n, (before, after), e, s in zip(size, self.padding, self.extent, self.stride, strict=True)
        )

    def then(self, after: ConvShape) -> ConvShape:
        """The one convolution that computes this one and then `after`, with all the padding at the front.

        In every dimension the taps of the first kernel lie d1 apart and those of the second s1 * d2 apart, seen from
        the input. The merged kernel has its taps on the coarsest grid that holds both: kernels after a stride grow
        as k1 + (k2 - 1) * s1, and kernels that are dilated alike stay dilated. Groups survive as far as both
        convolutions keep the channels apart.
        """
        if self.out_channels != after.in_channels or self.dims != after.dims:
            raise InvalidValue(f"{after} cannot follow {self}: channels or dimensions do not fit.")
        steps = tuple(s * d for s, d in zip(self.stride, after.dilation, strict=True))
        grid = tuple(
            gcd(d1 if k1 > 1 else 0, step if k2 > 1 else 0) or 1
            for k1, d1, k2, step in zip(self.kernel, self.dilation, after.kernel, steps, strict=True)
        )
        return ConvShape(
            in_channels=self.in_channels,
            out_channels=after.out_channels,
            kernel=tuple(
                ((k1 - 1) * d1 + (k2 - 1) * step) // d + 1
                for k1, d1, k2, step, d in zip(self.kernel, self.dilation, after.kernel, steps, grid, strict=True)
            ),
            stride=tuple(s1 * s2 for s1, s2 in zip(self.stride, after.stride, strict=True)),
            padding=tuple(
                (a1 + s * a2, b1 + s * b2)
                for (a1, b1), s, (a2, b2) in zip(self.padding, self.stride, after.padding, strict=True)
            ),
            dilation=grid,
            groups=gcd(self.groups, after.groups),
        )

    def offset(self, skip: ConvShape) -> tuple[int, ...] | None:
        """Where the first tap of `skip` falls inside this kernel when both start from the same value and are added.

        None where they cannot be one kernel: other channels or stride, or the skip reaches further than this kernel.
        """
        if (self.in_channels, self.out_channels, self.stride) != (skip.in_channels, skip.out_channels, skip.stride):
            return None
        offset = tuple(p[0] - q[0] for p, q in zip(self.padding, skip.padding, strict=True))
        if any(o < 0 or o + e > own for o, e, own in zip(offset, skip.extent, self.extent, strict=True)):
            return None
        return offset

    def plus(self, skip: ConvShape) -> ConvShape:
        """The one convolution that adds `skip` to this one. The grid is refined where the skip's taps demand it."""
        offset = self.offset(skip)
        if offset is None:
            raise InvalidValue(f"{skip} cannot be added into {self}.")
        grid = tuple(
            gcd(d if k > 1 else 0, e if m > 1 else 0, o) or 1
            for k, d, m, e, o in zip(self.kernel, self.dilation, skip.kernel, skip.dilation, offset, strict=True)
        )
        return ConvShape(
            in_channels=self.in_channels,
            out_channels=self.out_channels,
            kernel=tuple((e - 1) // d + 1 for e, d in zip(self.extent, grid, strict=True)),
            stride=self.stride,
            padding=self.padding,
            dilation=grid,
            groups=gcd(self.groups, skip.groups),
        )

    def __str__(self) -> str:
        """3x3 /2, 32 -> 64, depth-wise: what a person wants to see of a convolution."""
        text = "x".join(map(str, self.kernel))
        if max(self.dilation) > 1:
            text += " dilated " + _compact(self.dilation)
        if max(self.stride) > 1:
            text += f" /{_compact(self.stride)}"
        text += f", {self.in_channels} -> {self.out_channels}"
        if self.depthwise and self.groups > 1:
            return text + ", depth-wise"
        return text + (f", {self.groups} groups" if self.groups > 1 else "")


def _compact(values: tuple[int, ...]) -> str:
    return str(values[0]) if len(set(values)) == 1 else "x".join(map(str, values))
