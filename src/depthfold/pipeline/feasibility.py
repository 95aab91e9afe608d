"""What the latency table alone says, before anything is trained: the fastest plan, and whether it meets the budget."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from depthfold.backends import Backend, get
from depthfold.core import Budget, Frontier, ImportanceTable, LatencyTable, Score
from depthfold.errors import BudgetError, TableError
from depthfold.importance import importance_options
from depthfold.latency import choose
from depthfold.latency.calibration import is_inaccurate
from depthfold.latency.choose import MARGIN
from depthfold.pipeline.options import Options
from depthfold.progress import Progress
from depthfold.solver import solve
from depthfold.tracing import TracedNetwork


def fastest(traced: TracedNetwork, latency: LatencyTable, options: Options) -> Frontier:
    """Return the frontier of the fastest plan alone: if all importances are equal, no other plan is better."""
    blocks = importance_options(traced, options.space, options.moves)
    equal = ImportanceTable(
        network=traced.network.name,
        fingerprint=traced.network.fingerprint,
        entries=tuple(Score(span=block, dropped=dropped, samples=(0.0,)) for block, dropped in blocks),
    )
    return solve(latency, equal, network=traced.network)


@dataclass(frozen=True, slots=True)
class LatencyCheck:
    """The check of a latency table before a training: it must not be doubtful, and a plan must meet the budget.

    Without a target, or if the table was measured in another environment, nothing is timed.
    """

    traced: TracedNetwork
    latency: LatencyTable
    options: Options
    budget: Budget | None
    target: str | Backend | None = None
    run: Path | None = None
    progress: Progress | None = None

    def __call__(self) -> None:
        """Raise TableError if the table is doubtful, and BudgetError if no plan meets the budget."""
        if not self.options.allow_doubtful:
            check_trusted(self.latency, self.run)
        if self.budget is not None:
            self._check_reachable(self.budget)

    def _check_reachable(self, budget: Budget) -> None:
        """Compare the prediction for the fastest plan with the budget. Where its error decides, time the plan."""
        frontier = fastest(self.traced, self.latency, self.options)
        if frontier.original is None and budget.kind != "milliseconds":
            return  # choose() times the original
        predicted, limit = frontier.points[0].latency, budget.limit(frontier.original)
        calibration = self.latency.calibration
        error = calibration.worst_error if calibration else 0.0
        if predicted * (1 - error) > limit:
            raise self._out_of_reach(budget, limit, frontier)
        if predicted * (1 + error) > limit * (1 - MARGIN) and self.target is not None and self._is_here(self.target):
            choose(self.traced, frontier, budget, self.target, run=self.run, progress=self.progress)

    def _is_here(self, target: str | Backend) -> bool:
        return get(target).environment(self.traced.example_tensors()) == self.latency.environment

    def _out_of_reach(self, budget: Budget, limit: float, frontier: Frontier) -> BudgetError:
        ms, original = frontier.points[0].latency, frontier.original
        in_ms = "" if budget.kind == "milliseconds" else f" ({limit:.4g} ms)"
        found = f"No plan meets the budget of {budget}{in_ms}: the fastest plan takes {ms:.4g} ms"
        advice = "another target"
        if self.options.space == "paper":
            advice += ', or the larger search space (space="full", --space full)'
        if original is None:
            return BudgetError(
                f"{found} by the latency table, so nothing was trained. Use a larger budget or {advice}."
            )
        share = ms / original
        found += f", {share:.1%} of the original's {original:.4g} ms, by the latency table, so nothing was trained"
        if share > 1 - MARGIN:
            return BudgetError(f"{found}. Merging saves no time here: use {advice}.", fastest=share)
        least = math.ceil(100 * share / (1 - MARGIN))
        return BudgetError(f"{found}. Use a budget of {least}% or more, {advice}.", fastest=share)


def check_trusted(latency: LatencyTable, run: Path | None) -> None:
    """Raise TableError if the latency table is doubtful: trainings for the wrong blocks would be wasted."""
    doubt = latency.doubt
    if latency.calibration is not None and is_inaccurate(latency.calibration):
        doubt = f"it is {latency.calibration}"
    if doubt is not None:
        delete = "" if run is None else f", without latency.json and latency.jsonl in {run},"
        raise TableError(
            f"The latency table is doubtful, so nothing was trained: {doubt}. Measure it again{delete} when nothing "
            "else runs, or train with it anyway: allow_doubtful=True (--allow-doubtful)."
        )
