"""The findings of a run: the tables, the frontier, the chosen plan, and the measurements of its result."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from depthfold.core import (
    Document,
    Environment,
    Frontier,
    ImportanceTable,
    LatencyTable,
    MeasuredSpeedup,
    Network,
    Profile,
    SolvedPlan,
)
from depthfold.errors import InvalidValue
from depthfold.support.document import SPARSE
from depthfold.support.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The score of one network on data that it was not trained on.

    `spread` is the standard deviation over several training runs and `images` the number of scored images, if they are
    known. With `share`, the score is a share such as an accuracy of 0.712, and is printed in per cent.
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
            raise InvalidValue(f"The spread of an evaluation must be at least 0, found {self.spread!r}.")
        if self.images is not None and self.images < 1:
            raise InvalidValue(f"An evaluation needs at least one image, found images={self.images!r}.")

    @property
    def standard_error(self) -> float | None:
        """The standard error of a share that was counted over `images`; None if it is not known."""
        if not self.share or self.images is None:
            return None
        return math.sqrt(self.score * (1 - self.score) / self.images)

    def __str__(self) -> str:
        if not self.share:
            return f"{self.score:.4g}"
        error = self.standard_error
        return f"{self.score:.2%}" + (f" ± {100 * error:.2f}" if error is not None else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The result of verify() without its tensors: `ok` is True if it passed, and `text` states the largest errors."""

    ok: bool
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPoint:
    """A point of the training curve: the mean loss of the steps before it, and the score if it was taken."""

    step: int
    loss: float
    score: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8File:
    """An INT8 file beside the same network in float32: the task's scores on `split`, and latencies in milliseconds.

    `unreliable` says why the latencies are unreliable, if they are.
    """

    name: str
    split: str
    score: float
    float32_score: float
    latency: float
    float32_latency: float
    environment: Environment | None = None
    unreliable: str | None = field(default=None, metadata=SPARSE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings(Document):
    """The contents of a report. The fields from `before` on are optional, and the page lists those that are missing.

    `plan` is the chosen plan; it may be off the frontier. `predicted` is the predicted latency of the whole network, if
    it differs from the latency of the plan. `environment` describes the machine of the run, `versions` holds pairs of
    (package, version), and `command` is the command that repeats the run. `training` is the curve of the fine-tuning,
    and `int8` compares the exported INT8 files with float32.
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
    training: tuple[TrainingPoint, ...] = field(default=(), metadata=SPARSE)
    int8: tuple[Int8File, ...] = field(default=(), metadata=SPARSE)

    def __post_init__(self) -> None:
        if not isinstance(self.plan, SolvedPlan):
            raise InvalidValue(
                f"The plan of the findings {self.title!r} must be a SolvedPlan, which has latencies, found a "
                f'{type(self.plan).__name__}. Take one from the frontier, for example frontier.at("65%").'
            )
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
        """The predicted latency of the chosen plan in milliseconds."""
        return self.plan.latency if self.predicted is None else self.predicted

    @property
    def speedup(self) -> MeasuredSpeedup | None:
        """The measured speed-up; None if one of the two networks was not measured."""
        if not (self.before and self.after):
            return None
        return MeasuredSpeedup(original=self.before.quartiles, network=self.after.quartiles)

    @property
    def table_differences(self) -> tuple[str, ...]:
        """The differences between the environment of the latency table and that of the compressed network's
        measurement. If there are any, predictions and measurements are not comparable."""
        return self.latency.environment.differences(self.after.environment) if self.after else ()

    @property
    def profile_differences(self) -> tuple[str, ...]:
        """The differences between the environments of the two end-to-end measurements."""
        if not (self.before and self.after):
            return ()
        return self.before.environment.differences(self.after.environment)

    @property
    def missing(self) -> tuple[str, ...]:
        """The names of the optional parts that this report does not have."""
        absent = {
            "the end-to-end measurement of the original network": self.before is None,
            "the end-to-end measurement of the compressed network": self.after is None,
            "the score of the original network": self.score_before is None,
            "the score of the compressed network": self.score_after is None,
            "the verification of the merged network": self.verification is None,
            "the training curve": not self.training,
        }
        return tuple(name for name, is_absent in absent.items() if is_absent)

    def comparison(self) -> Table:
        """Return what was measured before and after the compression, and whether the speed-up is unreliable.

        Rows without two values are left out.
        """
        unreliable = self.speedup.unreliable if self.speedup else None
        notes = (f"Unreliable: {unreliable}.",) if unreliable else ()
        return Table((self.title,), ("", "before", "after", "change"), tuple(self._compared()), notes)

    def _repr_html_(self) -> str:
        return self.comparison().html()

    def _compared(self) -> Iterator[tuple[str, ...]]:
        before, after, one, two = self.before, self.after, self.score_before, self.score_after
        if before is not None and after is not None:
            yield "latency", f"{before.latency:.4g} ms", f"{after.latency:.4g} ms", str(self.speedup)
            halves = (f"{profile.spread[0]:.4g} to {profile.spread[1]:.4g}" for profile in (before, after))
            yield "interquartile range, ms", *halves, ""
        if one is not None and two is not None:
            change = two.score - one.score
            shown = f"{100 * change:+.2f} points" if one.share else f"{change:+.4g}"
            yield f"{one.metric}, {one.split}", str(one), str(two), shown
        yield "traced convolutions", str(self.network.depth), str(self.plan.convolutions), ""

    def _problems(self) -> Iterator[str]:
        depth, own = self.network.depth, self.network.fingerprint
        parts = {
            "latency table": (self.latency.depth, self.latency.fingerprint),
            "importance table": (self.importance.depth, self.importance.fingerprint),
            "frontier": (self.frontier.depth, self.frontier.fingerprint),
            "plan": (self.plan.segments[-1].span.j, self.plan.fingerprint),
        }
        for name, (found, _) in parts.items():
            if found != depth:
                yield f"the network has {depth} layers, the {name} {found}"
        for name, (_, found_print) in parts.items():
            if found_print not in ("", own):
                yield f"the {name} is of another network (fingerprint {found_print}, expected {own})"
