"""What can be gained on a target at all, and what the importances cost: known from the latency table alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from depthfold.core import Document, Environment, LatencyTable, Move, Space, Span, require_moves
from depthfold.core.latency_table import sum_times
from depthfold.errors import DataError
from depthfold.importance import Method, importance_options, left_out_options
from depthfold.importance.options import is_unchanged
from depthfold.latency.choose import reachable_budget
from depthfold.pipeline.feasibility import doubt_about, fastest, other_ways
from depthfold.pipeline.options import Options
from depthfold.support.table import Table
from depthfold.support.text import count, duration
from depthfold.tasks import ClassificationTask
from depthfold.tracing import TracedNetwork
from depthfold.training import Task
from depthfold.training.stepper import total_steps

SHOWN = 10  # spans in the text
LITTLE = 0.95  # a fastest plan that takes more than this share of the original's latency is not worth the trainings
TRAINING = 3  # a step of training takes about three forward passes
HEADER = ("span", "ms", "its layers", "saved")


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """A span that is faster as one convolution than its layers: both times in milliseconds."""

    span: Span
    merged: float
    layers: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospects(Document):
    """The fastest plan on a target, the spans that pay, and the cost of the importances.

    Times are in milliseconds, as predicted by the latency table. `spans` is the number of spans with a time that have
    several layers. `seconds` is a rough time for all importances in one process, None if the number of steps is not
    known. `doubt` says why the table is doubtful, if it is.
    """

    FORMAT: ClassVar[str] = "depthfold.prospects"

    network: str
    environment: Environment
    depth: int
    space: Space
    moves: tuple[Move, ...]
    original: float
    fastest: float
    convolutions: int
    spans: int
    savings: tuple[Saving, ...]
    importances: int
    method: str
    seconds: float | None
    doubt: str | None = None

    @property
    def share(self) -> float:
        """The latency of the fastest plan as a share of the original's."""
        return self.fastest / self.original

    @property
    def worth_it(self) -> bool:
        return self.share <= LITTLE

    def __str__(self) -> str:
        shown = tuple(
            (str(one.span), f"{one.merged:.4g}", f"{one.layers:.4g}", f"{one.layers - one.merged:.4g}")
            for one in self.savings[:SHOWN]
        )
        more = len(self.savings) - len(shown)
        notes = (*((f"... and {more} more",) if more else ()), "", *self._conclusion())
        if not shown:
            return "\n".join((*self._findings(), *notes))
        return Table((*self._findings(), ""), HEADER, shown, notes).text()

    def _findings(self) -> Iterator[str]:
        yield f"On {self.environment}:"
        yield (
            f"The fastest plan takes {self.fastest:.4g} ms, {self.share:.1%} of the original's {self.original:.4g} ms, "
            f"with {self.convolutions} of {count(self.depth, 'convolution')} (predicted; its accuracy is not known)."
        )
        which = ", most first:" if self.savings else "."
        yield f"{len(self.savings)} of {count(self.spans, 'span')} save time as one convolution{which}"

    def _conclusion(self) -> Iterator[str]:
        if self.seconds is None:
            time = "; their time depends on the data"
        else:
            time = f", about {duration(self.seconds)} in one process"
        yield f'The importances: {count(self.importances, "block")} to measure with the method "{self.method}"{time}.'
        provided = "" if self.doubt is None else ", if the latency table is right"
        if self.worth_it:
            yield f"Worth trying{provided}: budgets of {reachable_budget(self.share)} and more can be met."
        else:
            saved = "saves no time" if self.share >= 1 else f"saves only {1 - self.share:.1%}"
            yield f"Not worth it{provided}: even the fastest plan {saved}. Try {other_ways(self.space, self.moves)}."
        if self.doubt is not None:
            yield (
                f"The latency table is doubtful: {self.doubt}. Measure it again when nothing else runs, or train with "
                "it anyway: allow_doubtful=True (--allow-doubtful)."
            )


def prospects(
    traced: TracedNetwork, latency: LatencyTable, options: Options, task: Task | None = None
) -> Prospects | None:
    """Return what the latency table says; None if a single layer has no time, so that nothing can be compared."""
    frontier = fastest(traced, latency, options)
    if latency.original is None:
        return None
    layers = [time for time in latency.layers if time is not None]
    merged = {span: times for span, times in latency.times.items() if len(span) > 1}
    savings = [
        Saving(span=span, merged=times[span.j in traced.network.activations], layers=sum_times(layers[span.i : span.j]))
        for span, times in merged.items()
    ]
    paying = sorted((one for one in savings if one.merged < one.layers), key=lambda one: one.merged - one.layers)
    method = Method.of(options.importance_method, options.importance_recipe, options.reinit)
    blocks = importance_options(traced, options.space, options.moves)
    left_out = left_out_options(traced.network, blocks, method, latency)
    number = sum(one not in left_out and not (method.name != "trained" and is_unchanged(traced.network, one))
                 for one in blocks)  # fmt: skip
    image = latency.original / 1e3 / (latency.environment.batch or 1)
    forwards = _forwards(method, task)
    seconds = None if forwards is None else number * forwards * image
    return Prospects(
        network=traced.network.name, environment=latency.environment, depth=traced.depth, space=options.space,
        moves=require_moves(options.moves),
        original=latency.original, fastest=frontier.points[0].latency, convolutions=frontier[0].convolutions,
        spans=len(merged), savings=tuple(paying), importances=number, method=method.name, seconds=seconds,
        doubt=doubt_about(latency),
    )  # fmt: skip


def _forwards(method: Method, task: Task | None) -> int | None:
    """Return how many images run forward for an importance, roughly; None if that depends on data that are not there.

    A score may take longer than a few steps. That of a task of the user's own is left out, because it is not known.
    """
    if task is None:
        return None
    with contextlib.suppress(DataError):
        scored = task.count("holdout") if isinstance(task, ClassificationTask) else 0
        return total_steps(method.recipe, task) * method.recipe.batch * TRAINING + scored
    return None
