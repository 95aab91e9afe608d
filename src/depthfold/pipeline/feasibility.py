"""What the latency table alone says, before anything is trained: the fastest plan, and whether it meets the budget."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from depthfold.backends import Backend, get
from depthfold.core import Budget, Frontier, ImportanceTable, LatencyTable, Move, Score, Space, require_moves
from depthfold.errors import BudgetError, TableError
from depthfold.importance import importance_options
from depthfold.latency import choose
from depthfold.latency.calibration import is_inaccurate
from depthfold.latency.choose import MARGIN, reachable_budget
from depthfold.pipeline.options import Options
from depthfold.progress import Progress
from depthfold.solver import solve
from depthfold.store import RunFolder
from depthfold.store.run_folder import GIVEN, LATENCY
from depthfold.tracing import TracedNetwork


def fastest(traced: TracedNetwork, latency: LatencyTable, options: Options) -> Frontier:
    """Return the frontier of the fastest plan alone: if all importances are equal, no other plan is better."""
    blocks = importance_options(traced, options.space, options.moves)
    _check_space(traced, latency, options)
    equal = ImportanceTable(
        network=traced.network.name,
        fingerprint=traced.network.fingerprint,
        entries=tuple(Score(span=block, dropped=dropped, samples=(0.0,)) for block, dropped in blocks),
    )
    return solve(latency, equal, network=traced.network)


def _check_space(traced: TracedNetwork, latency: LatencyTable, options: Options) -> None:
    """Raise TableError if the table is of the other search space. solve() would say that entries are missing."""
    other: Space = "full" if options.space == "paper" else "paper"
    timed, own, others = (
        {entry.span for entry in latency.entries}, set(traced.spans(options.space)), set(traced.spans(other))
    )  # fmt: skip
    if timed != own and timed == others:
        raise TableError(
            f"The latency table is of the search space {other!r}, and importances are to be of {options.space!r}. "
            f"Measure the latencies in {options.space!r}, too, or use space={other!r} (--space {other})."
        )


@dataclass(frozen=True, slots=True)
class LatencyCheck:
    """The check of a latency table before a training: a plan must meet the budget, and the table not be doubtful.

    If the table was measured in another environment, the fastest plan is timed on the target. Without a target,
    nothing is timed.
    """

    traced: TracedNetwork
    latency: LatencyTable
    options: Options
    budget: Budget | None
    target: str | Backend | None = None
    run: Path | None = None
    progress: Progress | None = None

    def __call__(self) -> None:
        """Raise BudgetError if no plan meets the budget, and TableError if the table is doubtful or does not fit."""
        frontier = fastest(self.traced, self.latency, self.options)
        if self.budget is not None:
            _warn_if_met_already(self.budget, frontier.original)
        near = self.budget is not None and self._is_near(self.budget, frontier)
        self._check_trusted()  # after the budget: another table would not help one that no plan can meet
        if near and self.budget is not None and self.target is not None:
            choose(self.traced, frontier, self.budget, self.target, run=self.run, progress=self.progress)

    def _check_trusted(self) -> None:
        if not self.options.allow_doubtful:
            check_trusted(self.latency, self.run)

    def _is_near(self, budget: Budget, frontier: Frontier) -> bool:
        """Return True if only a measurement can tell whether the fastest plan meets the budget. Raise if it cannot."""
        if frontier.original is None and budget.kind != "milliseconds":
            return False  # choose() times the original
        if self.target is not None and not self._is_here(self.target):
            return True
        predicted, limit = frontier.points[0].latency, budget.limit(frontier.original)
        calibration = self.latency.calibration
        error = calibration.worst_error if calibration else 0.0
        if predicted * (1 - error) > limit:
            raise self._out_of_reach(budget, limit, frontier)
        return predicted * (1 + error) > limit * (1 - MARGIN)

    def _is_here(self, target: str | Backend) -> bool:
        return get(target).environment(self.traced.example_tensors()) == self.latency.environment

    def _out_of_reach(self, budget: Budget, limit: float, frontier: Frontier) -> BudgetError:
        ms, original = frontier.points[0].latency, frontier.original
        in_ms = "" if budget.kind == "milliseconds" else f" ({limit:.4g} ms)"
        found = f"No plan meets the budget of {budget}{in_ms}: the fastest plan takes {ms:.4g} ms"
        advice = other_ways(self.options.space, require_moves(self.options.moves))
        if original is None:
            return BudgetError(
                f"{found} by the latency table, so nothing was trained. Use a larger budget or {advice}."
            )
        share = ms / original
        found += f", {share:.1%} of the original's {original:.4g} ms, by the latency table, so nothing was trained"
        if share > 1 - MARGIN:
            return BudgetError(f"{found}. Merging saves no time here: use {advice}.", fastest=share)
        return BudgetError(f"{found}. Use a budget of {reachable_budget(share)} or more, or {advice}.", fastest=share)


def other_ways(space: Space, moves: Collection[Move]) -> str:
    """Return what else may save time."""
    ways = ["another target"]
    if space == "paper":
        ways.append('the larger search space (space="full", --space full)')
    if "drop-layers" not in moves:
        ways.append("plans that drop layers (moves=..., --moves drop-layers)")
    return " or ".join(ways)


def _warn_if_met_already(budget: Budget, original: float | None) -> None:
    if original is not None and budget.limit(original) > Budget.share(1).limit(original):
        warnings.warn(
            f"The original meets the budget of {budget} already, so the network may become slower. Use a budget below "
            "100%, or more than 1x, to make it faster.",
            stacklevel=4,  # the caller of compress()
        )


def check_trusted(latency: LatencyTable, run: Path | None) -> None:
    """Raise TableError if the latency table is doubtful: trainings for the wrong blocks would be wasted."""
    if (doubt := doubt_about(latency)) is not None:
        again = "measure it again"
        if run is not None and GIVEN in (RunFolder(run).made_from(LATENCY) or {}):
            again = "measure another one and give that"
        elif run is not None:
            again = f"delete latency.json and latency.jsonl in {run} and {again}"
        raise TableError(
            f"The latency table is doubtful, so nothing was trained: {doubt}. When nothing else runs, {again}, or "
            "train with this one anyway: allow_doubtful=True (--allow-doubtful)."
        )


def doubt_about(latency: LatencyTable) -> str | None:
    """Return why the table is doubtful; None if it is not."""
    if latency.calibration is not None and is_inaccurate(latency.calibration):
        return f"it is {latency.calibration}"
    return latency.doubt
