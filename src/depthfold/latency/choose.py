"""choose(): the closed loop. A plan is built, timed end to end beside the original, and exchanged until it fits."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from depthfold.backends import Backend, Compiled, get
from depthfold.core import Budget, Frontier, Plan, Point, SolvedPlan
from depthfold.errors import BudgetError
from depthfold.latency.candidates import network_inputs, shallow_of
from depthfold.latency.notebook import Notebook
from depthfold.latency.timer import Timer, Turns
from depthfold.progress import Progress, progress_bars
from depthfold.tracing import TracedNetwork

# A stopwatch never says the same thing twice. What is to meet the budget when somebody else measures it must meet it
# with a little to spare here.
MARGIN = 0.02


def choose(
    network: TracedNetwork,
    frontier: Frontier,
    budget: Budget | str | float,
    target: str | Backend,
    *,
    journal: str | Path | None = None,
    timer: Timer | None = None,
    steps: int = 10,
    progress: Progress | None = None,
) -> SolvedPlan:
    """The best plan of the frontier whose latency, measured end to end, meets the budget.

    Each candidate is built with random weights and timed in turns with the original (its batch norms folded, nothing
    else). Shares and speed-ups refer to what the original takes then. What each candidate takes beyond its prediction
    corrects the predictions of its neighbours; at most `steps` candidates are built. With the `journal` of
    measure_latency() the table learns from these measurements when it is made again.
    """
    backend, timer, budget = get(target), timer or Timer(turns=8), Budget.parse(budget)
    inputs = network_inputs(network)
    search = _Search(frontier.points, {}, float(budget.limit(frontier.original)))
    with contextlib.ExitStack() as stack:
        notebook = stack.enter_context(Notebook.open(journal, network, backend.environment(inputs)))
        step = (progress or stack.enter_context(progress_bars()))("candidates", steps, 0)
        original = stack.enter_context(
            contextlib.closing(backend.compile(shallow_of(network, network.vanilla), inputs))
        )
        while len(search.measured) < steps and (n := search.candidate()) is not None:
            plan = frontier[n].plan
            with contextlib.closing(backend.compile(shallow_of(network, plan), inputs)) as candidate:
                found = _in_turns({network.vanilla: original, plan: candidate}, timer, notebook)
            search.limit = float(budget.limit(found[network.vanilla])) * (1 - MARGIN)
            search.measured[n] = found[plan]
            step()
    if (best := search.best()) is None:
        raise _out_of_reach(budget, search, found[network.vanilla])
    return frontier[best]


def _in_turns(candidates: Mapping[Plan, Compiled], timer: Timer, notebook: Notebook) -> dict[Plan, float]:
    """The latencies of whole networks, all measured now and in turns, and noted for the next table."""
    known: dict[Plan, Turns] = {}
    timer.measure(candidates, known, lambda plan, samples: notebook.keep_turn(notebook.name_plan(plan), samples))
    return {plan: median(sample for turn in turns for sample in turn) for plan, turns in known.items()}


def _out_of_reach(budget: Budget, search: _Search, original: float) -> BudgetError:
    fastest = min(search.measured.values())
    return BudgetError(
        f"No plan meets the budget of {budget}: the fastest one takes {fastest:.4g} ms, measured end to end, which is "
        f"{fastest / original:.1%} of the original's {original:.4g} ms ({original / fastest:.2f} times as fast), and "
        f"{MARGIN:.0%} are kept to spare, because no stopwatch says the same thing twice. "
        "Ask for less, or measure with the full search space."
    )


@dataclass(slots=True)
class _Search:
    """Which plan to build next: plans by rising predicted latency and importance, and what was measured of some."""

    points: Sequence[Point]
    measured: dict[int, float]
    limit: float

    def best(self) -> int | None:
        return max((n for n, latency in self.measured.items() if latency <= self.limit), default=None)

    def candidate(self) -> int | None:
        """The best plan that should meet the budget, by the predictions as corrected so far; None when it is known.

        Plans at or above one that failed are out; and if nothing is left, the fastest one must tell.
        """
        best = self.best()
        failed = min((n for n, latency in self.measured.items() if latency > self.limit), default=len(self.points))
        low = -1 if best is None else best
        fitting = [n for n in range(low + 1, failed) if self._corrected(n) <= self.limit]
        if fitting:
            return fitting[-1]
        return 0 if best is None and 0 not in self.measured else None

    def _corrected(self, n: int) -> float:
        """The prediction times what the nearest measured plan took over its own prediction."""
        if not self.measured:
            return self.points[n].latency
        nearest = min(self.measured, key=lambda m: abs(m - n))
        return self.points[n].latency * self.measured[nearest] / max(self.points[nearest].latency, 1e-12)
