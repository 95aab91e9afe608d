"""Padding that depends on the size of the map, fixed at the traced size: at which other sizes it is the same."""

from __future__ import annotations

from dataclasses import dataclass

from depthfold.errors import InvalidValue


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
