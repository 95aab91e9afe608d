"""What a report tells: the nouns of a run, and what was measured of its result."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from depthfold.core import (
    Document,
    Environment,
    Frontier,
    ImportanceTable,
    LatencyTable,
    Network,
    Profile,
    SolvedPlan,
)
from depthfold.errors import InvalidValue


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A score of one network on data that it was not trained on.

    `spread` is the standard deviation over several trainings, `images` how many images were scored; either may be
    unknown. A share (an accuracy of 0.712) is printed in per cent; any other score as it is.
    """

    score: float
    metric: str = "accuracy"
    split: str = "test set"
    share: bool = True
    spread: float | None = None
    images: int | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.score) or (self.share and not 0 <= self.score <= 1):
            expected = "a share between 0 and 1 (or share=False)" if self.share else "a finite number"
            raise InvalidValue(f"The {self.metric} of an evaluation must be {expected}, found {self.score!r}.")
        if self.spread is not None and not (math.isfinite(self.spread) and self.spread >= 0):
            raise InvalidValue(f"The spread of an evaluation must be a number from 0 on, found {self.spread!r}.")
        if self.images is not None and self.images < 1:
            raise InvalidValue(f"An evaluation is on at least one image, found images={self.images!r}.")

    @property
    def standard_error(self) -> float | None:
        """How far the share may be off because only so many images were scored; None where it is not known."""
        if not self.share or self.images is None:
            return None
        return math.sqrt(self.score * (1 - self.score) / self.images)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What verify() found, without its tensors: whether the merged network computes the same, and how far it is off."""

    ok: bool
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings(Document):
    """Everything that a report tells. From `before` on nothing is needed; what is missing the page says in words.

    `plan` is the plan that was chosen; it need not lie on the frontier. `predicted` is the latency that was predicted
    for the whole network, where that is something else than the plan's own. `environment` is where the run took place,
    `versions` are (package, version), `command` is what runs it again.
    """

    FORMAT: ClassVar[str] = "depthfold.findings"

    title: str
    network: Network
    latency: LatencyTable
    importance: ImportanceTable
    frontier: Frontier
    plan: SolvedPlan
    before: Profile | None = None
    after: Profile | None = None
    score_before: Evaluation | None = None
    score_after: Evaluation | None = None
    predicted: float | None = None
    verification: Verified | None = None
    environment: Environment | None = None
    versions: tuple[tuple[str, str], ...] = ()
    command: str | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.latency.activations is None:  # a CSV file has none
            latency = dataclasses.replace(self.latency, activations=self.network.activations)
            object.__setattr__(self, "latency", latency)
        if problems := tuple(self._problems()):
            raise InvalidValue(
                f"The findings {self.title!r} do not belong together: {'; '.join(problems)}. Give the tables, the "
                "frontier and the plan of one network."
            )

    @property
    def predicted_latency(self) -> float:
        """What was predicted for the chosen plan, in milliseconds."""
        return self.plan.latency if self.predicted is None else self.predicted

    @property
    def elsewhere(self) -> tuple[str, ...]:
        """How the environment of the latency table differs from the one in which the compressed network was measured:
        where it does, predictions and measurements are not of the same thing."""
        return self.latency.environment.differences(self.after.environment) if self.after else ()

    @property
    def missing(self) -> tuple[str, ...]:
        """What this report has to leave out, in words."""
        absent = {
            "the original network measured end to end": self.before is None,
            "the compressed network measured end to end": self.after is None,
            "the score of the original network": self.score_before is None,
            "the score of the compressed network": self.score_after is None,
            "the verification of the merged network": self.verification is None,
        }
        return tuple(words for words, is_absent in absent.items() if is_absent)

    def _problems(self) -> Iterator[str]:
        depth = self.network.depth
        depths = {
            "latency table": self.latency.depth,
            "importance table": self.importance.depth,
            "frontier": self.frontier.depth,
            "plan": self.plan.segments[-1].span.j,
        }
        for what, found in depths.items():
            if found != depth:
                yield f"the network has {depth} layers, the {what} {found}"
        own = self.network.fingerprint
        for what, noun in (("latency table", self.latency), ("importance table", self.importance),
                           ("frontier", self.frontier), ("plan", self.plan)):  # fmt: skip
            if noun.fingerprint not in ("", own):
                yield f"the {what} is of another network (fingerprint {noun.fingerprint}, expected {own})"
