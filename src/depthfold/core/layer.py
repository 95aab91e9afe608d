"""The parts of a network: layers, skips and refusals."""

from __future__ import annotations

from dataclasses import dataclass, field

from depthfold.core.shape import ConvShape
from depthfold.core.span import Position, Span
from depthfold.errors import InvalidValue
from depthfold.support.document import SPARSE


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason `why` a module or operation `where` cannot be merged.

    `code` is the kind of reason. `position` is the position of the barrier that the refusal causes, if any.
    """

    where: str
    code: str
    why: str
    position: Position | None = None

    def __post_init__(self) -> None:
        if not (self.where and self.code and self.why):
            raise InvalidValue(f"A refusal needs a location, a code and a reason, found {self!r}.")

    def __str__(self) -> str:
        at = "" if self.position is None else f" (position {self.position})"
        return f"{self.where}{at}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Convolution l with its batch norm, constant factors and, where a residual connection ends, the addition.

    `activation` is the kind of the activation sigma_l after the layer, such as "relu6", or None if there is none.
    `in_size` and `out_size` are the spatial sizes at the traced input size.
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
                f"{self.where}: for an input of size {self.in_size}, the output of {self.shape} has size "
                f"{self.shape.out_size(self.in_size)}, not {self.out_size}."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """A residual connection: the value at `source` is added to the output of layer `target`.

    The value is added unchanged, or through a linear `projection` (ResNet's "downsample"). Only residuals that can be
    folded into a kernel are skips; any other addition is a barrier. `side` is True if such a value is added at `target`
    before this one: it would be lost with the branch, so the branch cannot be dropped.
    """

    source: Position
    target: Position
    where: str
    projection: ConvShape | None = None
    side: bool = field(default=False, metadata=SPARSE)

    def __post_init__(self) -> None:
        if not 0 <= self.source < self.target:
            raise InvalidValue(f"The skip {self.where} must go forward, found {self.source} -> {self.target}.")

    @property
    def span(self) -> Span:
        return Span(self.source, self.target)

    def crosses(self, span: Span) -> bool:
        """Return True unless the span contains the whole skip, lies inside it, or lies outside it."""
        outside = span.j <= self.source or span.i >= self.target
        return not (outside or span.contains(self.span) or self.span.contains(span))
