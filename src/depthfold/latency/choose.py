"""choose(): the closed loop. A plan is built, timed end to end beside the original, and exchanged until it fits."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from depthfold.backends import Backend, Compiled, get
from depthfold.core import Budget, Frontier, Plan, Point, SolvedPlan
from depthfold.errors import BackendError, BudgetError, InvalidValue, OutOfMemory, TableError
from depthfold.latency.candidates import build_plan, held
from depthfold.latency.journal import LatencyJournal
from depthfold.latency.timer import Timer, Turns, milliseconds
from depthfold.progress import Progress, progress_bars
from depthfold.tracing import TracedNetwork, expect_traced

# A stopwatch never says the same thing twice. What is to meet the budget when somebody else measures it must meet it
# with a little to spare here.
MARGIN = 0.02


def choose(
    traced: TracedNetwork,
    frontier: Frontier,
    budget: Budget | str | float,
    target: str | Backend,
    *,
    run: str | Path | None = None,
    timer: Timer | None = None,
    steps: int = 10,
    progress: Progress | None = None,
) -> SolvedPlan:
    """The best plan of the frontier whose latency, measured end to end, meets the budget.

    Each candidate is built with random weights and timed in turns with the original (its batch norms folded, nothing
    else). Shares and speed-ups refer to what the original takes then. What each candidate takes beyond its prediction
    corrects the predictions of its neighbours; at most `steps` candidates are built, and where none of them fits, the
    fastest one of all, before a budget is said to be out of reach. With the run folder, `run`, of measure_latency() the
    table learns from these measurements when it is made again. A candidate that the runtime rejects is passed over.
    """
    backend, timer, budget = get(target), timer or Timer(turns=8), Budget.parse(budget)
    _expect(traced, frontier, steps)
    inputs = traced.example_tensors()
    with contextlib.ExitStack() as stack:
        journal = stack.enter_context(LatencyJournal(run, traced, backend.environment(inputs)))
        tick = (progress or stack.enter_context(progress_bars()))("candidates", steps, 0)
        try:
            vanilla = {traced.vanilla: build_plan(traced, backend, traced.vanilla, inputs)}
        except BackendError as error:
            raise _original(error) from error
        stack.enter_context(held(vanilla))
        alone, failed_alone = _in_turns(vanilla, timer)
        if failed_alone:
            raise _original(failed_alone[traced.vanilla])
        search = _Search(frontier.points, budget, alone[traced.vanilla], frontier.original)

        def measure(n: int) -> None:
            plan = frontier[n].plan
            try:
                with held({plan: build_plan(traced, backend, plan, inputs)}) as candidate:
                    found, failed = _in_turns({**vanilla, **candidate}, timer)
            except BackendError as error:
                search.rejected[n] = _words(error)
                return
            if original_failed := failed.get(traced.vanilla):
                if not isinstance(original_failed, OutOfMemory):
                    raise _original(original_failed)
                failed[plan] = OutOfMemory(f"Beside it there is no room for the original: {_words(original_failed)}")
            if plan in failed:
                search.rejected[n] = _words(failed[plan])
                return
            search.measured[n] = Measured(found[plan], found[traced.vanilla])
            journal.keep_share(plan, search.measured[n].share)

        for left in range(steps, 0, -1):
            if (n := search.candidate(last=left == 1)) is None:
                for _ in range(left):  # it knows enough, and its bar must not stay half way
                    tick()
                break
            measure(n)
            tick()
        if search.best() is None and not search.knows_fastest():
            measure(0)
    if (best := search.best()) is None:
        raise _out_of_reach(budget, search)
    return frontier[best]


def _expect(traced: TracedNetwork, frontier: Frontier, steps: int) -> None:
    expect_traced(traced, "choose")
    if not isinstance(frontier, Frontier):
        raise InvalidValue(
            f"choose() takes the frontier that solve() returns, found {type(frontier).__name__}. Give all of it: "
            "choose() walks along its plans."
        )
    if type(steps) is not int or steps < 1:
        raise InvalidValue(f"choose() needs one step at least to measure a candidate, found steps={steps!r}.")
    own = traced.network.fingerprint
    if frontier.fingerprint not in ("", own):
        raise TableError(
            f"The frontier is of another network (fingerprint {frontier.fingerprint}; this one is {own}). Solve with "
            "the tables of this network."
        )


def _in_turns(candidates: Mapping[Plan, Compiled], timer: Timer) -> tuple[dict[Plan, float], dict[Plan, BackendError]]:
    """The latencies of whole networks, all measured now and in turns, and the errors of those that failed."""
    known: dict[Plan, Turns] = {}
    failed: dict[Plan, BackendError] = {}
    timer.measure(candidates, known, fail=failed.__setitem__)
    done = {plan: turns for plan, turns in known.items() if plan not in failed}
    return {plan: milliseconds(turns) for plan, turns in done.items()}, failed


def _original(error: BackendError) -> BackendError:
    return type(error)(
        f"The original network cannot be timed, and nothing can be compared with it. {_words(error)}. Run again, or "
        "name another runtime or other options of it."
    )


def _words(error: BackendError) -> str:
    """Its words, to stand in a sentence: some of them end with a full stop."""
    return str(error).removesuffix(".")


def _out_of_reach(budget: Budget, search: _Search) -> BudgetError:
    if not search.measured:
        return BudgetError(
            f"No plan could be measured for the budget of {budget}; the runtime says: "
            f"{'; '.join(dict.fromkeys(search.rejected.values()))}. Name another runtime, or other options of it."
        )
    fastest = min(search.measured.values(), key=lambda found: found.share)
    which = "the fastest one" if 0 in search.measured else "the fastest one that was timed"
    return BudgetError(
        f"No plan meets the budget of {budget}: {which} takes {fastest.latency:.4g} ms, measured end to end, "
        f"which is {fastest.share:.1%} of the original's {fastest.original:.4g} ms ({1 / fastest.share:.2f} times as "
        f"fast), and {MARGIN:.0%} are kept to spare, because no stopwatch says the same thing twice. "
        'Ask for less, or measure with the full search space: space="full", or --space full on the command line.',
        fastest=fastest.share,
    )


@dataclass(frozen=True, slots=True)
class Measured:
    """A candidate and the original, timed in turns. A machine drifts, so only what was timed together compares."""

    latency: float
    original: float

    @property
    def share(self) -> float:
        return self.latency / max(self.original, 1e-12)


@dataclass(slots=True)
class _Search:
    """Which plan to build next: plans by rising predicted latency and importance, and what was measured of some."""

    points: Sequence[Point]
    budget: Budget
    original: float  # as it was timed at the beginning
    in_table: float | None  # as the frontier has it: of the hour in which the table was made
    measured: dict[int, Measured] = field(default_factory=dict)
    rejected: dict[int, str] = field(default_factory=dict)

    def best(self) -> int | None:
        return max((n for n, found in self.measured.items() if self._fits(found)), default=None)

    def knows_fastest(self) -> bool:
        """Whether the plan with the smallest prediction was tried."""
        return 0 in self.measured or 0 in self.rejected

    def candidate(self, *, last: bool) -> int | None:
        """The best plan that should meet the budget, by the predictions as corrected so far; None when it is known.

        Plans at or above one that failed are out. If nothing is left, or only one step, the fastest one must tell.
        """
        best = self.best()
        failed = min((n for n, found in self.measured.items() if not self._fits(found)), default=len(self.points))
        low = -1 if best is None else best
        open_ones = [n for n in range(low + 1, failed) if n not in self.rejected]
        fitting = [n for n in open_ones if self._should_fit(n)]
        fastest = next(iter(open_ones), None) if best is None else None
        if last and fastest is not None and self.measured:
            return fastest
        return fitting[-1] if fitting else fastest

    def _fits(self, found: Measured) -> bool:
        return found.latency <= self.budget.limit(found.original) * (1 - MARGIN)

    def _should_fit(self, n: int) -> bool:
        """By the prediction, times what the nearest measured plan took over its own prediction."""
        if not self.measured:
            slower = self.original / self.in_table if self.in_table else 1.0  # the machine now than then
            return self._fits(Measured(self.points[n].latency * slower, self.original))
        nearest = min(self.measured, key=lambda m: abs(m - n))
        found = self.measured[nearest]
        corrected = self.points[n].latency * found.latency / max(self.points[nearest].latency, 1e-12)
        return self._fits(Measured(corrected, found.original))
