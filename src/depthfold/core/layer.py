"""The parts of a network: layers and the skips across them."""

from __future__ import annotations

from dataclasses import dataclass

from depthfold.core.shape import ConvShape
from depthfold.core.span import Position, Span
from depthfold.errors import InvalidValue

# Why something cannot be merged, in a sentence.


@dataclass(frozen=True, slots=True)
class Refusal:
    """`where` (a module or operation of the model) cannot be merged, for the reason `why`.

    `code` is the kind of the reason, for counting and for programs. `position` is the position at which the refusal
    puts a barrier, if it puts one.
    """

    where: str
    code: str
    why: str
    position: Position | None = None

    def __post_init__(self) -> None:
        if not (self.where and self.code and self.why):
            raise InvalidValue(f"A refusal needs a place, a code and a reason, found {self!r}.")

    def __str__(self) -> str:
        at = "" if self.position is None else f" (position {self.position})"
        return f"{self.where}{at}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Convolution l with its batch norm and, where a residual ends there, the addition.

    `activation` is the kind of sigma_l, the activation that stands after the layer ("relu6"), or None where the
    network has none, that is, the identity. `in_size` and `out_size` are the spatial sizes seen while tracing.
    """

    where: str
    shape: ConvShape
    in_size: tuple[int, ...]
    out_size: tuple[int, ...]
    norm: str | None = None
    activation: str | None = None

    def __post_init__(self) -> None:
        if not len(self.in_size) == len(self.out_size) == self.shape.dims:
            raise InvalidValue(f"{self.where}: sizes {self.in_size} and {self.out_size} do not fit {self.shape}.")
        if self.shape.out_size(self.in_size) != self.out_size:
            raise InvalidValue(
                f"{self.where}: {self.shape} makes {self.shape.out_size(self.in_size)} of an input of size "
                f"{self.in_size}, not {self.out_size}."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """A residual: the value at `source` is added to the output of layer `target`.

    The value goes as it is, or through a linear `projection` (the convolution and batch norm that ResNet calls
    downsample). Only residuals that a span can take into its kernel are skips; an addition of anything else is a
    barrier.
    """

    source: Position
    target: Position
    where: str
    projection: ConvShape | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.source < self.target:
            raise InvalidValue(f"The skip {self.where} must go forward, found {self.source} -> {self.target}.")

    @property
    def span(self) -> Span:
        return Span(self.source, self.target)

    def crosses(self, span: Span) -> bool:
        """Whether the span crosses one end of this skip: it holds it neither whole, nor lies inside, nor outside."""
        outside = span.j <= self.source or span.i >= self.target
        return not (outside or span.contains(self.span) or self.span.contains(span))
