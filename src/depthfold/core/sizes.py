"""Padding that depends on the size of the map, fixed at the traced size: at which other sizes it is the same."""

from __future__ import annotations

from dataclasses import dataclass

from depthfold.errors import InvalidValue


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRule:
    """The sizes of one dimension at which a padding is the traced one: those that leave one of the `remainders` when
    divided by `period`. A period of 0 stands for a single size, the traced one."""

    period: int
    remainders: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.period < 0 or not self.remainders:
            raise InvalidValue(f"A size rule needs a period >= 0 and a remainder, found {self!r}.")

    @property
    def any_size(self) -> bool:
        return self.period == len(self.remainders)

    def allows(self, size: int) -> bool:
        return (size % self.period if self.period else size) in self.remainders

    def __str__(self) -> str:
        if self.any_size:
            return "any"
        values = " or ".join(map(str, self.remainders))
        if self.period == 0:
            return values
        if self.period == 2:
            return "odd" if self.remainders == (1,) else "even"
        return f"{values} modulo {self.period}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPadding:
    """A module that pads by the size of its input: `size` is the traced one, `rules` hold for each dimension."""

    where: str
    size: tuple[int, ...]
    rules: tuple[SizeRule, ...]

    @property
    def any_size(self) -> bool:
        return all(rule.any_size for rule in self.rules)

    def __str__(self) -> str:
        traced = "x".join(map(str, self.size))
        return f"{self.where} (traced at {traced}; allowed sizes: {' x '.join(map(str, self.rules))})"
