"""Spans: consecutive layers that may be merged into one convolution."""

from __future__ import annotations

from dataclasses import dataclass

from depthfold.errors import InvalidValue

# A position is an integer 0..L. Position l is the value after layer l, where the activation sigma_l is. Position 0 is
# the input of the first layer.
Position = int


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """The layers i+1..j, which may be merged into one convolution. The key of the latency table T[i, j]."""

    i: Position
    j: Position

    def __post_init__(self) -> None:
        _check_ends(self.i, self.j)

    @property
    def layers(self) -> range:
        """The numbers of the layers in this span."""
        return range(self.i + 1, self.j + 1)

    @property
    def inner(self) -> range:
        """The positions strictly inside, whose activations must be removed before the span can be merged."""
        return range(self.i + 1, self.j)

    def contains(self, other: Span) -> bool:
        return self.i <= other.i and other.j <= self.j

    def __len__(self) -> int:
        return self.j - self.i

    def __str__(self) -> str:
        return f"({self.i}, {self.j}]"


@dataclass(frozen=True, slots=True, order=True)
class FlaggedSpan:
    """A span with flags for an activation at i (a) and at j (b). The key of the importance table I[i, j, a, b]."""

    i: Position
    j: Position
    a: bool
    b: bool

    def __post_init__(self) -> None:
        _check_ends(self.i, self.j)
        for name in ("a", "b"):
            if getattr(self, name) not in (False, True):
                raise InvalidValue(f"The flag {name} of a span must be 0 or 1, found {getattr(self, name)!r}.")
            object.__setattr__(self, name, bool(getattr(self, name)))

    @property
    def span(self) -> Span:
        return Span(self.i, self.j)

    def __str__(self) -> str:
        return f"({self.i}, {self.j}], flags {int(self.a)}{int(self.b)}"


def _check_ends(i: int, j: int) -> None:
    if not 0 <= i < j:
        raise InvalidValue(f"A span needs positions 0 <= i < j, found i={i!r}, j={j!r}.")
