"""The plan that was chosen, kept: a stopwatch might choose another one the next time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from depthfold.backends import Backend, get
from depthfold.core import Budget, Document, Environment, Frontier, SolvedPlan
from depthfold.latency import choose
from depthfold.latency.candidates import network_inputs
from depthfold.progress import Progress
from depthfold.store.run_folder import CHOICE, LATENCY_JOURNAL, RunFolder
from depthfold.tracing import TracedNetwork


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Document):
    """A plan of a frontier, for a budget, by the stopwatch of an environment. `best` and `fastest` tell this frontier
    from another one: its ends in latency and importance."""

    FORMAT: ClassVar[str] = "depthfold.choice"

    budget: str
    environment: Environment
    ends: tuple[float, ...]
    plan: SolvedPlan


def chosen(
    folder: RunFolder,
    network: TracedNetwork,
    frontier: Frontier,
    budget: Budget,
    target: str | Backend,
    progress: Progress | None,
) -> SolvedPlan:
    """The plan of choose(), or the one that it chose before for the same frontier, budget and environment."""
    environment = get(target).environment(network_inputs(network))
    first, last = frontier.points[0], frontier.points[-1]
    ends = (first.latency, first.importance, last.latency, last.importance)
    before = folder.read(CHOICE, Choice)
    if before is not None and (before.budget, before.environment, before.ends) == (str(budget), environment, ends):
        return before.plan
    plan = choose(network, frontier, budget, target, journal=folder.path / LATENCY_JOURNAL, progress=progress)
    folder.write(CHOICE, Choice(budget=str(budget), environment=environment, ends=ends, plan=plan))
    return plan
