"""The budget: how long the compressed network may take, end to end."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal, DecimalException
from fractions import Fraction
from numbers import Real
from typing import ClassVar, Literal, Self

from depthfold.errors import BudgetError
from depthfold.support.coerce import as_float
from depthfold.support.document import Document

Kind = Literal["milliseconds", "share", "speedup"]
READABLE = 'Readable are 12.5 (milliseconds), "12.5ms", "60%" of the original\'s latency, and "1.5x" as fast.'
PATTERN = re.compile(r"(?P<number>[^\s%x]+?)\s*(?P<unit>ms|%|x)", re.IGNORECASE)
LARGEST_SHARE = 10  # whoever asks for more has written per cent where a share is expected


@dataclass(frozen=True, slots=True)
class Budget(Document):
    """Milliseconds, a share of the original's latency, or a speed-up over it."""

    FORMAT: ClassVar[str] = "depthfold.budget"

    kind: Kind
    value: float

    def __post_init__(self) -> None:
        if self.kind not in ("milliseconds", "share", "speedup"):
            raise BudgetError(f"A budget is in milliseconds, a share or a speedup, found {self.kind!r}.")
        if isinstance(self.value, bool) or not isinstance(self.value, Real | Decimal):
            raise BudgetError(f"The budget {self.value!r} cannot be read. {READABLE}")
        object.__setattr__(self, "value", as_float("The budget", self.value, BudgetError))
        if math.isnan(self.value):
            raise BudgetError(f"The budget is NaN. {READABLE}")
        if math.isinf(self.value):
            raise BudgetError("The budget is infinite; the best plan without a budget is the last of frontier.plans.")
        if self.value == 0:
            raise BudgetError(f"The budget is zero; every network takes some time. {READABLE}")
        if self.value < 0:
            raise BudgetError(
                f"The budget is negative ({self.value:g}); no network takes less than no time. {READABLE}"
            )
        if self.kind == "share" and self.value > LARGEST_SHARE:
            raise BudgetError(
                f"The budget is {self.value:g} times the original's latency; a share is 1 for all of it, and at most "
                f"{LARGEST_SHARE}. Did you mean {self.value / 100:g}?"
            )

    @classmethod
    def milliseconds(cls, value: float) -> Self:
        return cls("milliseconds", value)

    @classmethod
    def share(cls, value: float) -> Self:
        """0.6: at most sixty per cent of the original's latency."""
        return cls("share", value)

    @classmethod
    def speedup(cls, value: float) -> Self:
        """1.6: at least 1.6 times as fast as the original."""
        return cls("speedup", value)

    @classmethod
    def parse(cls, budget: Budget | str | float | Decimal) -> Budget:
        """What a person writes: 12.5, "12.5ms", "60%", "1.5x". A bare number is milliseconds."""
        if isinstance(budget, Budget):
            return budget
        if not isinstance(budget, str):
            return cls("milliseconds", budget)  # type: ignore[arg-type]  # the constructor makes a float of it
        match = PATTERN.fullmatch(budget.strip())
        text = match["number"] if match else budget.strip()
        try:
            # Decimal, so that 33.3% is the float closest to 0.333 and not 33.3 divided in binary.
            number = Decimal(text)
            per_cent = number / 100
        except DecimalException:
            raise BudgetError(f"The budget {budget!r} cannot be read. {READABLE}") from None
        unit = match["unit"].lower() if match else "ms"
        if unit == "ms":
            return cls.milliseconds(float(number))
        return cls.share(float(per_cent)) if unit == "%" else cls.speedup(float(number))

    def limit(self, original: float | None) -> Fraction:
        """The budget in milliseconds, exactly.

        A share of 0.6 is meant as six tenths, not as the float closest to it: six tenths of 10 ms must admit a plan
        that takes 6 ms.
        """
        if self.kind == "milliseconds":
            return Fraction(self.value)
        if original is None:
            raise BudgetError(
                f"The budget {self} needs the latency of the original, and a single layer has no time in the latency "
                "table. Give the original's latency to solve(), or ask in milliseconds."
            )
        meant = Fraction(repr(self.value))
        return Fraction(original) * meant if self.kind == "share" else Fraction(original) / meant

    def __str__(self) -> str:
        if self.kind == "share":
            return f"{self.value * 100:.6g}%"
        return f"{self.value:.6g}{' ms' if self.kind == 'milliseconds' else 'x'}"
