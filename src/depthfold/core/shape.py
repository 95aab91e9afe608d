"""Shapes of convolutions, and the rules for composing and adding two of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Self

from depthfold.errors import InvalidValue


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRule:
    """The sizes of one dimension at which a padding is the same as at the traced size.

    These are the sizes between `smallest` and `largest` whose remainder modulo `period` is in `remainders`.
    """

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
    """A module whose padding depends on its input size: the traced `size`, and a rule for each dimension."""

    where: str
    size: tuple[int, ...]
    rules: tuple[SizeRule, ...]

    def __str__(self) -> str:
        traced = "x".join(map(str, self.size))
        return f"{self.where} (traced at {traced}; allowed sizes: {' x '.join(map(str, self.rules))})"


Padding = tuple[tuple[int, int], ...]  # (before, after) for every dimension

# The most parameters of a composed convolution: 1 GiB in float64. The full search space of a wide network contains much
# larger ones, and none of them is faster than the layers that it replaces.
LARGEST = 2**27


def as_pad_argument(padding: Padding) -> tuple[int, ...]:
    """Return the padding in the order of F.pad, last dimension first."""
    return tuple(width for pair in reversed(padding) for width in pair)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvShape:
    """The shape of one convolution in 1, 2 or 3 dimensions.

    `padding` is (before, after) for every dimension, because the padding of a merged convolution may be asymmetric.
    Where the kernel has one tap, the dilation has no meaning, and is 1.
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
        # Equal convolutions must be equal as keys of the tables: composing with the identity forgets such a dilation.
        meaningful = tuple(d if k > 1 else 1 for d, k in zip(self.dilation, self.kernel, strict=True))
        object.__setattr__(self, "dilation", meaningful)

    @classmethod
    def identity(cls, channels: int, dims: int) -> Self:
        """Return the identity: a convolution with one tap per channel."""
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
    def keeps_shape(self) -> bool:
        """True if input and output have the same channels and, at every size, the same size."""
        same = all(sum(pad) == extent - 1 for pad, extent in zip(self.padding, self.extent, strict=True))
        return same and self.in_channels == self.out_channels and max(self.stride) == 1

    @property
    def extent(self) -> tuple[int, ...]:
        """The size of the kernel including dilation."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilation, strict=True))

    @property
    def symmetric(self) -> bool:
        """True if the padding is the same on both sides, as PyTorch's convolutions require."""
        return all(before == after for before, after in self.padding)

    @property
    def parameters(self) -> int:
        """The number of weights and biases."""
        return self.out_channels * (self.in_channels // self.groups * prod(self.kernel) + 1)

    @property
    def too_large(self) -> str | None:
        """The reason why this convolution is too large to be composed, or None."""
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
        """Return the convolution that computes this one followed by `after`, with all padding at the front.

        In each dimension, the taps of the first kernel are d1 apart, and those of the second are s1 * d2 apart in terms
        of the input. The merged kernel uses the coarsest grid that contains both: a kernel after a stride grows to
        k1 + (k2 - 1) * s1, and equally dilated kernels stay dilated. The number of groups is the greatest common
        divisor of both.
        """
        if self.out_channels != after.in_channels or self.dims != after.dims:
            raise InvalidValue(f"{after} cannot follow {self}: channels or dimensions differ.")
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
        """Return the position of the first tap of `skip` in this kernel if both have the same input and are added.

        Return None if they cannot be one kernel: channels or strides differ, or the skip exceeds this kernel.
        """
        if (self.in_channels, self.out_channels, self.stride) != (skip.in_channels, skip.out_channels, skip.stride):
            return None
        offset = tuple(p[0] - q[0] for p, q in zip(self.padding, skip.padding, strict=True))
        if any(o < 0 or o + e > own for o, e, own in zip(offset, skip.extent, self.extent, strict=True)):
            return None
        return offset

    def plus(self, skip: ConvShape) -> ConvShape:
        """Return the convolution that computes the sum of this one and `skip`, on a finer grid if necessary."""
        offset = self.offset(skip)
        if offset is None:
            raise InvalidValue(f"{skip} cannot be added to {self}.")
        grid = tuple(
            gcd(d if k > 1 else 0, e if m > 1 else 0, o) or 1
            for k, d, m, e, o in zip(self.kernel, self.dilation, skip.kernel, skip.dilation, offset, strict=True)
        )
        kernel = tuple((e - 1) // d + 1 for e, d in zip(self.extent, grid, strict=True))
        return replace(self, kernel=kernel, dilation=grid, groups=gcd(self.groups, skip.groups))

    def __str__(self) -> str:
        """Return a short description, such as "3x3 /2, 32 -> 64, depth-wise"."""
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
