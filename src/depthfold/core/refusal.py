"""Why something cannot be merged, in a sentence."""

from __future__ import annotations

from dataclasses import dataclass

from depthfold.core.span import Position
from depthfold.errors import InvalidValue


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
