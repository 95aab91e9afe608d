"""The plan that was chosen, kept: a stopwatch might choose another one the next time."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import ClassVar

from depthfold.backends import Backend, get
from depthfold.core import Budget, Document, Environment, Frontier, SolvedPlan
from depthfold.errors import VerificationError
from depthfold.latency import choose
from depthfold.merging import merge
from depthfold.progress import Progress
from depthfold.rewriting import rewrite
from depthfold.store.run_folder import CHOICE, LATENCY_JOURNAL, RunFolder
from depthfold.tracing import TracedNetwork


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Document):
    """A plan of a frontier, for a budget, by the stopwatch of an environment. `frontier` is a digest of every point of
    the frontier: another table is another frontier, and may have a better plan."""

    FORMAT: ClassVar[str] = "depthfold.choice"

    budget: str
    environment: Environment
    frontier: str
    plan: SolvedPlan


def chosen(
    folder: RunFolder,
    traced: TracedNetwork,
    frontier: Frontier,
    budget: Budget,
    target: str | Backend,
    progress: Progress | None,
) -> SolvedPlan:
    """The plan of choose(), or the one that it chose before for the same frontier, budget and environment. It is kept
    only if it merges, so whoever finds it in a run need not try that again before a training."""
    environment = get(target).environment(traced.example_tensors())
    digest, before = _digest(frontier), folder.read(CHOICE, Choice)
    there = before and (before.budget, before.environment, before.frontier)
    if before is not None and there == (str(budget), environment, digest):
        return before.plan
    plan = choose(traced, frontier, budget, target, journal=folder.path / LATENCY_JOURNAL, progress=progress)
    _expect_merging(traced, plan, budget)
    folder.write(CHOICE, Choice(budget=str(budget), environment=environment, frontier=digest, plan=plan))
    return plan


def _expect_merging(traced: TracedNetwork, plan: SolvedPlan, budget: Budget) -> None:
    """Merge the plan with the weights that there are: choose() times sketches, which nobody compares with anything, and
    what is wrong would show only when the student has been trained."""
    try:
        merge(rewrite(traced, plan))
    except VerificationError as error:
        raise VerificationError(
            f"The plan that was chosen for the budget of {budget} cannot be used, and nothing was trained for it. "
            f"{error} Meanwhile, ask for another budget, whose plan may merge, or leave out what does not: "
            "ignore=... in Python, --ignore on the command line, in a run folder of its own."
        ) from error


def _digest(frontier: Frontier) -> str:
    """Sixteen hex digits of all plans: what each takes, what it is worth, and what it does."""
    plans = ((plan.latency, plan.importance, sorted(plan.activations), sorted(plan.cuts)) for plan in frontier.plans)
    return hashlib.sha256(repr(list(plans)).encode()).hexdigest()[:16]
