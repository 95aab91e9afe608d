"""The fitted surrogate: a linear model of the score that a whole plan reaches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from depthfold.core.plan import Plan
from depthfold.errors import InvalidValue
from depthfold.support.document import Document


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedPlan:
    """A plan that was trained as a whole: the sum of its importances, its number of blocks, and the score it reached.

    The blocks are those of the surrogate objective: the plan has one boundary less than blocks.
    """

    plan: Plan
    importance: float
    blocks: int
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate(Document):
    """score = intercept + slope * (sum of the importances) + per_block * (number of blocks).

    The paper's alpha is such a term by hand: it adds the same number to the importance of every block. Here the term is
    fitted to the scores of trained plans. `tau` is Kendall's tau of its predictions: each plan is left out once, and a
    fit to the others orders it among them.
    """

    FORMAT: ClassVar[str] = "depthfold.surrogate"

    intercept: float
    slope: float
    per_block: float
    tau: float
    plans: tuple[TrainedPlan, ...]
    network: str = ""
    fingerprint: str = ""
    provenance: str = ""

    def __post_init__(self) -> None:
        if not self.slope > 0:
            raise InvalidValue(
                f"The slope of a surrogate must be more than 0, found {self.slope:g}: plans with a higher importance "
                "would be predicted to be worse."
            )

    def predict(self, importance: float, blocks: int) -> float:
        """Return the score that a plan is predicted to reach, from the sum of its importances and its blocks."""
        return self.intercept + self.slope * importance + self.per_block * blocks

    def __str__(self) -> str:
        return (
            f"score = {self.intercept:.4g} + {self.slope:.3g} * importance + {self.per_block:.3g} * blocks, fitted to "
            f"{len(self.plans)} trained plans (Kendall's tau {self.tau:.2f}, each plan left out once)"
        )
