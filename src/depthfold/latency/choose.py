"""choose(): find the best plan of a frontier whose measured latency meets the budget."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from depthfold.backends import Backend, Compiled, get
from depthfold.core import Budget, Frontier, MeasuredSpeedup, Plan, Point, SolvedPlan
from depthfold.core.speedup import Quartiles, quartiles
from depthfold.errors import BackendError, BudgetError, InvalidValue, OutOfMemory, TableError
from depthfold.latency.candidates import build_plan, closing_all
from depthfold.latency.journal import LatencyJournal
from depthfold.latency.timer import Rounds, Timer
from depthfold.progress import Progress, progress_bars
from depthfold.support.coerce import as_whole
from depthfold.tracing import TracedNetwork, require_traced

# Repeated measurements differ a little, so a plan must meet the budget with this margin.
MARGIN = 0.02


def choose(
    traced: TracedNetwork,
    frontier: Frontier,
    budget: Budget | str,
    target: str | Backend,
    *,
    run: str | Path | None = None,
    timer: Timer | None = None,
    steps: int = 10,
    progress: Progress | None = None,
) -> SolvedPlan:
    """Return the best plan of the frontier whose latency, measured end to end, meets the budget.

    Each candidate is built with random weights and timed together with the original network, in which only the batch
    norms are merged. Shares and speed-ups are relative to that time of the original; the plan has both times in
    `measured`. The measured latency of a candidate corrects the predictions for plans near it. At most `steps`
    candidates are built; if none of them meets the budget, the fastest plan is also tried. A candidate that the runtime
    rejects is skipped. With the run folder of measure_latency(), the next table is also calibrated with these
    measurements, as far as they are reliable.
    """
    backend, timer, budget = get(target), timer or Timer(rounds=8), Budget.parse(budget)
    _check_arguments(traced, frontier, steps)
    environment = backend.environment(traced.example_tensors())
    with contextlib.ExitStack() as stack:
        journal = stack.enter_context(LatencyJournal(run, traced, environment))
        tick = (progress or stack.enter_context(progress_bars("Choosing a plan")))("candidates", steps, 0)
        comparison = stack.enter_context(_compare_with_original(traced, backend, timer))
        search = _Search(frontier.points, budget, comparison.original_alone, frontier.original)

        def measure(n: int) -> None:
            plan = frontier[n].plan
            try:
                found = search.measured[n] = comparison.measure(plan)
            except _Rejected as error:
                search.rejected[n] = str(error)
            else:
                if not found.unreliable:  # the next table would be fitted to the load of another process
                    journal.add_share(plan, found.share)

        for left in range(steps, 0, -1):
            if (n := search.next_candidate(last=left == 1)) is not None:
                measure(n)
            tick()  # also after the search has ended, so that its bar is full
        if search.best() is None and 0 not in search.measured and 0 not in search.rejected:
            measure(0)  # the fastest plan
    if (best := search.best()) is None:
        raise _out_of_reach(budget, search)
    return replace(frontier[best], measured=search.measured[best])


def _check_arguments(traced: TracedNetwork, frontier: Frontier, steps: int) -> None:
    require_traced(traced, "choose")
    if not isinstance(frontier, Frontier):
        raise InvalidValue(f"choose() takes the frontier that solve() returns, found {type(frontier).__name__}.")
    as_whole("The number of steps", steps, InvalidValue)
    own = traced.network.fingerprint
    if frontier.fingerprint not in ("", own):
        raise TableError(
            f"The frontier is of another network (fingerprint {frontier.fingerprint}; this one is {own}). Solve with "
            "the tables of this network."
        )


def reachable_budget(share: float) -> str:
    """Return a budget that a plan with this share of the latency meets, with the margin and one per cent for noise."""
    return f"{min(math.ceil(100 * share / (1 - MARGIN)) + 1, 100)}%"


def _out_of_reach(budget: Budget, search: _Search) -> BudgetError:
    if not search.measured:
        return BudgetError(
            f"No plan could be measured for the budget of {budget}. The runtime reported: "
            f"{'; '.join(dict.fromkeys(search.rejected.values()))}. Use another runtime or other options."
        )
    fastest = min(search.measured.values(), key=lambda found: found.share)
    which = "the fastest one" if 0 in search.measured else "the fastest one that was timed"
    larger = f"a budget of {reachable_budget(fastest.share)} or more, or " if fastest.share <= 1 - MARGIN else ""
    return BudgetError(
        f"No plan meets the budget of {budget} with a margin of {MARGIN:.0%}: {which} takes {fastest.latency:.4g} ms, "
        f"measured end to end, which is {fastest.share:.1%} of the original's {fastest.original_latency:.4g} ms "
        f"({1 / fastest.share:.2f} times as fast). Use {larger}other plans, if "
        'they are not allowed yet: space="full" (--space full) merges more layers, and moves=... (--moves drop-layers) '
        "drops some.",
        fastest=fastest.share,
    )


class _Rejected(Exception):
    """The runtime cannot build or run a candidate."""


@contextlib.contextmanager
def _compare_with_original(traced: TracedNetwork, backend: Backend, timer: Timer) -> Iterator[_Comparison]:
    """Build the original and time it alone."""
    try:
        original = build_plan(traced, backend, traced.vanilla, traced.example_tensors())
    except BackendError as error:
        raise _original_failed(error) from error
    with closing_all({traced.vanilla: original}) as compiled:
        found, failed = _time_together(compiled, timer)
        if failed:
            raise _original_failed(failed[traced.vanilla])
        _, alone, _ = found[traced.vanilla]
        yield _Comparison(traced, backend, timer, original, alone)


@dataclass(frozen=True, slots=True)
class _Comparison:
    """The compiled original, with which candidates are timed."""

    traced: TracedNetwork
    backend: Backend
    timer: Timer
    original: Compiled
    original_alone: float

    def measure(self, plan: Plan) -> MeasuredSpeedup:
        """Build a plan and time it together with the original. Raise _Rejected if the plan cannot be timed."""
        vanilla, inputs = self.traced.vanilla, self.traced.example_tensors()
        try:
            with closing_all({plan: build_plan(self.traced, self.backend, plan, inputs)}) as candidate:
                found, failed = _time_together({vanilla: self.original, **candidate}, self.timer)
        except BackendError as error:
            raise _Rejected(_without_full_stop(error)) from error
        if original_failed := failed.get(vanilla):
            if not isinstance(original_failed, OutOfMemory):
                raise _original_failed(original_failed)
            reason = _without_full_stop(original_failed)
            raise _Rejected(f"The original does not fit into memory together with it: {reason}")
        if plan in failed:
            raise _Rejected(_without_full_stop(failed[plan]))
        return MeasuredSpeedup(original=found[vanilla], network=found[plan])


def _time_together(
    candidates: Mapping[Plan, Compiled], timer: Timer
) -> tuple[dict[Plan, Quartiles], dict[Plan, BackendError]]:
    """Return the quartiles of whole networks, timed in the same rounds, and the errors of those that failed."""
    rounds: dict[Plan, Rounds] = {}
    failed: dict[Plan, BackendError] = {}
    timer.measure(candidates, rounds, fail=failed.__setitem__)
    known = {plan: quartiles([*chain(*found)]) for plan, found in rounds.items() if plan not in failed}
    return known, failed


def _original_failed(error: BackendError) -> BackendError:
    return type(error)(
        f"The original network cannot be timed: {_without_full_stop(error)}. Run again, or use another runtime or "
        "other options."
    )


def _without_full_stop(error: BackendError) -> str:
    return str(error).removesuffix(".")


@dataclass(slots=True)
class _Search:
    """The points of a frontier, by rising latency and importance, and the measurements so far."""

    points: Sequence[Point]
    budget: Budget
    original: float  # its latency, timed at the start
    original_in_table: float | None  # its latency when the table was made
    measured: dict[int, MeasuredSpeedup] = field(default_factory=dict)
    rejected: dict[int, str] = field(default_factory=dict)

    def best(self) -> int | None:
        return max((n for n in self.measured if self._meets(n)), default=None)

    def next_candidate(self, *, last: bool) -> int | None:
        """Return the best plan that should meet the budget, by the corrected predictions; None if the best is known.

        Plans above one that missed the budget are excluded. If no plan should fit, or only one step is left, return the
        fastest plan.
        """
        best = self.best()
        missed = min((n for n in self.measured if not self._meets(n)), default=len(self.points))
        untried = [n for n in range(0 if best is None else best + 1, missed) if n not in self.rejected]
        fitting = [n for n in untried if self._should_fit(n)]
        fastest = next(iter(untried), None) if best is None else None
        if last and fastest is not None and self.measured:
            return fastest
        return fitting[-1] if fitting else fastest

    def _meets(self, n: int) -> bool:
        found = self.measured[n]
        return self._fits(found.latency, found.original_latency)

    def _fits(self, latency: float, original: float) -> bool:
        return latency <= self.budget.limit(original) * (1 - MARGIN)

    def _should_fit(self, n: int) -> bool:
        """Return True if the prediction, corrected by the error of the nearest measured plan, meets the budget."""
        if not self.measured:
            slowdown = self.original / self.original_in_table if self.original_in_table else 1.0
            return self._fits(self.points[n].latency * slowdown, self.original)
        nearest = min(self.measured, key=lambda m: abs(m - n))
        found = self.measured[nearest]
        corrected = self.points[n].latency * found.latency / max(self.points[nearest].latency, 1e-12)
        return self._fits(corrected, found.original_latency)
