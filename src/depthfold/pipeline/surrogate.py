"""fit_surrogate(): train a few whole plans along the frontier, and fit the surrogate to their scores."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from depthfold.core import Frontier, ImportanceTable, LatencyTable, Plan, Surrogate, TrainedPlan
from depthfold.errors import InvalidValue, TableError
from depthfold.importance.journal import ImportanceJournal
from depthfold.jobs import Executor, InProcess, Job, Work, check_is_executor
from depthfold.progress import Progress, progress_bars
from depthfold.rewriting import rewrite
from depthfold.solver import FEWEST, fit_to_plans, solve
from depthfold.store.run_folder import SURROGATE_JOURNAL
from depthfold.support.coerce import as_whole
from depthfold.support.digest import digest
from depthfold.support.text import count
from depthfold.tracing import TracedNetwork, free_weights, require_traced
from depthfold.training import Recipe, Task, check_has_holdout, check_task, preset, task_name, train

PLANS = 12


def fit_surrogate(
    traced: TracedNetwork,
    task: Task,
    latency: LatencyTable,
    importance: ImportanceTable,
    recipe: Recipe | str = "plans",
    *,
    plans: int = PLANS,
    executor: Executor | None = None,
    run: str | Path | None = None,
    progress: Progress | None = None,
) -> Surrogate:
    """Train whole plans briefly, and fit their scores by the sum of their importances and their number of blocks.

    The plans lie along the frontiers of two problems, one of which prefers more blocks, so that both variables vary.
    Each is distilled from the original network with the recipe and scored on the hold-out set. `solve(...,
    surrogate=...)` then maximises the predicted score. With a run folder, `run`, every score is written to a journal,
    and the next call trains only what is missing.
    """
    recipe = preset(recipe) if isinstance(recipe, str) else recipe
    executor = InProcess() if executor is None else executor
    require_traced(traced, "fit_surrogate")
    check_task(task)
    check_has_holdout(task)
    check_is_executor(executor)
    plans = as_whole("The number of plans", plans, InvalidValue, least=FEWEST)
    chosen = plans_along_frontier(traced, latency, importance, plans)
    jobs = [Job(key=digest(*one.plan.digest_parts), payload=one.plan) for one in chosen]
    inputs = surrogate_depends_on(traced, task, recipe)
    with contextlib.ExitStack() as stack:
        journal = stack.enter_context(ImportanceJournal(run, inputs, name=SURROGATE_JOURNAL))
        progress = progress or stack.enter_context(progress_bars("Surrogate"))
        missing = [job for job in jobs if journal.missing(job.key, retry=True)]
        step = progress("plans", len(jobs), len(jobs) - len(missing))
        with contextlib.closing(executor.run(PlanSetup(traced, task, recipe), missing)) as outcomes:
            for outcome in outcomes:
                journal.add(outcome)
                step()
    trained = [
        TrainedPlan(plan=one.plan, importance=one.importance, blocks=one.blocks, score=journal.results[key]["score"])
        for one in chosen
        if (key := digest(*one.plan.digest_parts)) in journal.results
    ]
    if len(trained) < max(FEWEST, len(chosen) / 2):
        first = next(journal.failures[job.key] for job in jobs if job.key in journal.failures).rstrip(".")
        raise TableError(
            f"{count(len(chosen) - len(trained), 'plan')} of {len(chosen)} could not be trained. The first failure: "
            f"{first}. Correct this, and run again."
        )
    return fit_to_plans(
        trained, network=traced.network.name, fingerprint=traced.network.fingerprint,
        provenance=f"{task_name(task)}; {recipe}",
    )  # fmt: skip


def surrogate_depends_on(traced: TracedNetwork, task: Task, recipe: Recipe) -> dict[str, Any]:
    """Return what the scores of trained plans depend on."""
    return {
        "network": traced.network.fingerprint,
        "weights": traced.weights_digest,
        "task": task_name(task),
        "recipe": recipe.to_json(),
        "what": "whole plans",
    }


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan to train, with its explaining variables."""

    plan: Plan
    importance: float
    blocks: int


def plans_along_frontier(
    traced: TracedNetwork, latency: LatencyTable, importance: ImportanceTable, number: int
) -> list[Candidate]:
    """Return up to `number` different plans, half of them from a problem in which each block counts extra.

    They are evenly spread over the latencies from the fastest plan to the original network. Raise TableError if there
    are too few to fit a surrogate.
    """
    values = [abs(value) for value in importance.importances.values()]
    extra = median(values) if values else 0.0  # without any, solve() says what is wrong with the table
    chosen: dict[Plan, Candidate] = {}
    for per_block, wanted in ((0.0, number - number // 2), (extra, number)):
        # The surrogate with slope 1 adds per_block to every importance, which is taken off the sum again.
        shifted = Surrogate(intercept=0.0, slope=1.0, per_block=per_block, tau=0.0, plans=())
        frontier = solve(latency, importance, surrogate=shifted, network=traced.network)
        for index in _evenly_spread(frontier, number):
            point = frontier[index]
            blocks = len(point.boundaries) + 1
            if len(chosen) < wanted:
                total = point.importance - per_block * blocks
                chosen.setdefault(point.plan, Candidate(plan=point.plan, importance=total, blocks=blocks))
    if len(chosen) < FEWEST:
        raise TableError(
            f"The tables yield only {count(len(chosen), 'different plan')}, and a surrogate is fitted to at least "
            f'{FEWEST}. Use alpha instead, or measure the tables of the larger search space (space="full").'
        )
    return list(chosen.values())


def _evenly_spread(frontier: Frontier, number: int) -> Iterator[int]:
    """Yield indices of plans, from coarse to fine: both ends first, then the plans nearest to halves, quarters, ..."""
    times = np.array([point.latency for point in frontier.points])
    seen: set[int] = set()
    parts = 1
    while parts <= 4 * number and len(seen) < len(times):
        for target in np.linspace(times[0], times[-1], parts + 1):
            index = int(np.argmin(np.abs(times - target)))
            if index not in seen:
                seen.add(index)
                yield index
        parts *= 2


@dataclass(frozen=True, slots=True)
class PlanSetup:
    """The setup of a worker that trains whole plans. The network is moved to the CPU, as for importances."""

    traced: TracedNetwork
    task: Task
    recipe: Recipe

    def __post_init__(self) -> None:
        object.__setattr__(self, "traced", self.traced.cpu())

    def __call__(self) -> Work:
        return self.result

    def result(self, plan: Plan) -> dict[str, Any]:
        """Train the student of a plan with the original network as its teacher, and return its score."""
        student, teacher = rewrite(self.traced, plan), rewrite(self.traced, self.traced.vanilla).eval()
        try:
            trained = train(student, self.task, self.recipe, teacher=teacher)
        finally:
            free_weights(student, teacher)
        curve = [(point.step, point.loss, point.score) for point in trained.curve]
        return {"score": trained.score, "curve": curve, "seconds": trained.seconds}
