"""The budget: the time that the compressed network may take, end to end."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from depthfold.errors import BudgetError
from depthfold.support.coerce import as_float
from depthfold.support.document import Document

Kind = Literal["milliseconds", "share", "speedup"]
READABLE = 'Write "12.5ms", "60%" of the original\'s latency, or "1.5x" as fast.'
PATTERN = re.compile(r"(?P<number>[^\s%x]+?)\s*(?P<unit>ms|%|x)", re.IGNORECASE)
LARGEST = {"milliseconds": math.inf, "share": 10.0, "speedup": math.inf}
ROUNDING = 1e-12  # of a budget: more than the rounding of the floats, and far less than the error of a time


@dataclass(frozen=True, slots=True)
class Budget(Document):
    """Milliseconds, a share of the original's latency, or a speed-up over it."""

    FORMAT: ClassVar[str] = "depthfold.budget"

    kind: Kind
    value: float

    def __post_init__(self) -> None:
        if self.kind not in LARGEST:
            raise BudgetError(f"A budget is in milliseconds, a share or a speedup, found {self.kind!r}.")
        value = as_float("The value of a budget", self.value, BudgetError)
        object.__setattr__(self, "value", value)
        if not (0 < value < math.inf and value <= LARGEST[self.kind]):
            hint = f"Did you mean {value / 100:g}?" if self.kind == "share" and 10 < value < math.inf else READABLE
            raise BudgetError(
                f"A budget must be positive and finite, and a share of the original at most 10; found {value:g} as "
                f"{self.kind}. {hint}"
            )

    @classmethod
    def milliseconds(cls, value: float) -> Self:
        return cls("milliseconds", value)

    @classmethod
    def share(cls, value: float) -> Self:
        """Return a share of the original's latency: 0.6 is at most sixty per cent of it."""
        return cls("share", value)

    @classmethod
    def speedup(cls, value: float) -> Self:
        """Return a speed-up: 1.6 is at least 1.6 times as fast as the original."""
        return cls("speedup", value)

    @classmethod
    def parse(cls, budget: Budget | str) -> Budget:
        """Read "12.5ms", "60%" or "1.5x". A number without a unit is refused: 60 may be meant in any of the three."""
        if isinstance(budget, Budget):
            return budget
        match = PATTERN.fullmatch(budget.strip()) if isinstance(budget, str) else None
        try:
            if match is None:
                raise ValueError
            number = float(match["number"])
        except ValueError:
            raise BudgetError(f"The budget {budget!r:.80} is not a number with a unit. {READABLE}") from None
        match match["unit"].lower():
            case "%":
                return cls.share(round(number / 100, 15))  # 33.3% is 0.333, not 33.3 divided in binary
            case "x":
                return cls.speedup(number)
            case _:
                return cls.milliseconds(number)

    def limit(self, original: float | None) -> float:
        """Return the budget in milliseconds.

        A share or a speed-up is ROUNDING more than asked for, so that 60% of 10 ms admits 6 ms, and the share or the
        speed-up of a plan is a budget that admits the plan.
        """
        if self.kind == "milliseconds":
            return self.value
        if original is None:
            raise BudgetError(
                f"The budget {self} needs the latency of the original, and a single layer has no time in the latency "
                "table. Ask in milliseconds."
            )
        return (original * self.value if self.kind == "share" else original / self.value) * (1 + ROUNDING)

    def __str__(self) -> str:
        if self.kind == "share":
            return f"{self.value * 100:.6g}%"
        return f"{self.value:.6g}{' ms' if self.kind == 'milliseconds' else 'x'}"
