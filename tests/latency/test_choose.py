"""choose() on a runtime with computed times."""

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
from torch import nn

from depthfold.backends.cost_model import CostModel
from depthfold.core import Network
from depthfold.errors import BackendError, BudgetError, InvalidValue, OutOfMemory, TableError
from depthfold.latency import choose, measure_latency
from depthfold.latency.calibration import DoubtfulTable
from depthfold.latency.journal import LatencyJournal
from depthfold.latency.measure import timed_networks
from depthfold.merging import sketch
from depthfold.progress import progress_lines
from depthfold.rewriting import rewrite
from latency_workshop import COST, QUICK, milliseconds


@pytest.mark.parametrize("share", [0.95, 0.8, 0.7])
def test_chosen_plan_is_the_best_that_meets_the_budget(traced, frontier, share):
    original = milliseconds(traced, traced.vanilla)
    plan = choose(traced, frontier, f"{share:.0%}", COST, timer=QUICK)
    assert milliseconds(traced, plan.plan) <= share * original
    meeting = [p for p in frontier if milliseconds(traced, p.plan) <= 0.98 * share * original]
    assert plan.importance == max(p.importance for p in meeting)


def scaled(frontier, factor):
    """Return the frontier with all predictions multiplied by a factor."""
    points = tuple(dataclasses.replace(point, latency=factor * point.latency) for point in frontier.points)
    segments = tuple(
        dataclasses.replace(segment, times=(factor * segment.times[0], factor * segment.times[1]))
        for segment in frontier.segments
    )
    return dataclasses.replace(frontier, points=points, segments=segments)


def test_measurements_correct_wrong_predictions(traced, frontier):
    """Predictions that are 30 % too low first lead to plans that miss the budget."""
    wrong = scaled(frontier, 0.7)
    original = milliseconds(traced, traced.vanilla)
    plan = choose(traced, wrong, "80%", COST, timer=QUICK)
    assert milliseconds(traced, plan.plan) <= 0.8 * original


def test_chosen_plan_has_the_measured_times_beside_the_predicted_ones(traced, frontier):
    plan = choose(traced, scaled(frontier, 0.7), "80%", COST, timer=QUICK)
    assert plan.measured.latency == pytest.approx(milliseconds(traced, plan.plan))
    assert plan.measured.original_latency == pytest.approx(milliseconds(traced, traced.vanilla))
    assert plan.latency < 0.8 * plan.measured.latency
    assert frontier[0].measured is None


@dataclasses.dataclass(frozen=True, slots=True)
class Interrupted(CostModel):
    """A busy machine: every third run takes three times as long."""

    def compile(self, module, inputs):
        compiled, factors = CostModel.compile(self, module, inputs), itertools.cycle((1.0, 1.0, 3.0))
        return SimpleNamespace(seconds=lambda: next(factors) * compiled.seconds(), close=compiled.close)


def test_times_of_a_busy_machine_are_unreliable(traced, frontier):
    plan = choose(traced, frontier, "90%", Interrupted(), timer=dataclasses.replace(QUICK, samples=9))
    low, middle, high = plan.measured.original
    assert low == pytest.approx(middle) and high == pytest.approx(3 * low)
    assert plan.measured.unreliable.startswith(f"the original took {low:.4g} to {high:.4g} ms and the compressed ")


def test_message_for_an_unreachable_budget_gives_the_fastest_latency(traced, frontier):
    fastest = min(milliseconds(traced, plan.plan) for plan in frontier)
    with pytest.raises(BudgetError, match=rf"the fastest one takes {fastest:.4g} ms"):
        choose(traced, frontier, "5%", COST, timer=QUICK)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_fastest_plan_is_timed_before_a_budget_is_called_unreachable(traced, frontier, steps):
    """The only candidate misses the budget, but the fastest plan meets it."""
    original = milliseconds(traced, traced.vanilla)
    shares = [milliseconds(traced, plan.plan) / original for plan in frontier]
    assert min(shares) == shares[0] < 0.6
    plan = choose(traced, scaled(frontier, 0.8), "70%", COST, timer=QUICK, steps=steps)
    assert milliseconds(traced, plan.plan) <= 0.7 * original
    with pytest.raises(BudgetError, match=rf"the fastest one takes .* which is {shares[0]:.1%} of the") as raised:
        choose(traced, scaled(frontier, 0.8), "5%", COST, timer=QUICK, steps=steps)
    assert raised.value.fastest == pytest.approx(shares[0])


def test_message_says_if_the_fastest_plan_could_not_be_timed(traced, frontier):
    fastest = COST.compile(sketch(rewrite(traced, frontier[0].plan)), tuple(traced.blueprint.inputs.args)).seconds()

    @dataclasses.dataclass(frozen=True, slots=True)
    class Picky(CostModel):
        def compile(self, module, inputs):
            compiled = CostModel.compile(self, module, inputs)
            if compiled.seconds() == pytest.approx(fastest):
                raise BackendError("not this one")
            return compiled

    second = milliseconds(traced, frontier[1].plan) / milliseconds(traced, traced.vanilla)
    with pytest.raises(BudgetError, match=r"the fastest one that was timed takes") as raised:
        choose(traced, frontier, "5%", Picky(), timer=QUICK)
    assert raised.value.fastest == pytest.approx(second)


def test_next_table_is_calibrated_with_the_measurements_of_choose(traced, frontier, tmp_path):
    before = measure_latency(traced, COST, timer=QUICK, networks=6, run=tmp_path)
    choose(traced, frontier, "80%", COST, timer=QUICK, run=tmp_path)
    after = measure_latency(traced, COST, timer=QUICK, networks=6, run=tmp_path)
    assert after.calibration.networks > before.calibration.networks
    with LatencyJournal(tmp_path, traced, COST.environment(tuple(traced.blueprint.inputs.args))) as journal:
        learnt = [plan for key, plan in journal.plans.items() if key in journal.shares and not journal.is_timed(key)]
        _, *found = timed_networks(traced.network, journal, before.times, (traced.vanilla, *learnt))
    assert found and [whole.segments for whole in found] == [traced.network.segments(plan) for plan in learnt]
    for whole, plan in zip(found, learnt, strict=True):
        assert whole.latency == pytest.approx(milliseconds(traced, plan))
        assert milliseconds(traced, plan) < 0.9 * milliseconds(traced, traced.vanilla)  # so that the share matters
        assert after.predict(traced.network, plan) == pytest.approx(milliseconds(traced, plan), rel=0.02)


@pytest.mark.parametrize("backend", [COST, Interrupted()], ids=["quiet", "busy"])
def test_unreliable_measurements_of_choose_are_not_kept(traced, frontier, tmp_path, backend):
    choose(traced, frontier, "90%", backend, timer=dataclasses.replace(QUICK, samples=9), run=tmp_path)
    with LatencyJournal(tmp_path, traced, backend.environment(traced.example_tensors())) as journal:
        assert bool(journal.shares) == (backend is COST)


def test_measurements_of_choose_change_predictions(traced, frontier, tmp_path):
    """Plans that took twice as long as predicted, relative to the original, get larger predictions."""
    before = measure_latency(traced, COST, timer=QUICK, networks=6, run=tmp_path)
    surprising = list(frontier)[: len(frontier) // 2]
    with LatencyJournal(tmp_path, traced, COST.environment(tuple(traced.blueprint.inputs.args))) as journal:
        for solved in surprising:
            journal.add_share(solved.plan, 2 * milliseconds(traced, solved.plan) / milliseconds(traced, traced.vanilla))
    with pytest.warns(DoubtfulTable):
        after = measure_latency(traced, COST, timer=QUICK, networks=6, run=tmp_path)
    for solved in surprising:
        was = before.predict(traced.network, solved.plan)
        assert was == pytest.approx(milliseconds(traced, solved.plan), rel=0.02)
        assert 1.2 * was < after.predict(traced.network, solved.plan) < 2.5 * was


def drifting(factor):
    """Return a machine whose speed changes by a factor whenever something is compiled."""
    slowdown = [1.0]

    class Slow:
        def __init__(self, compiled):
            self.compiled, self.close = compiled, compiled.close

        def seconds(self):
            return self.compiled.seconds() * slowdown[0]

    @dataclasses.dataclass(frozen=True, slots=True)
    class Backend(CostModel):
        def compile(self, module, inputs):
            slowdown[0] *= factor
            return Slow(CostModel.compile(self, module, inputs))

    return Backend()


@pytest.mark.parametrize("factor", [1.3, 0.8])
def test_drift_of_the_machine_does_not_lead_to_a_plan_that_misses_the_budget(traced, frontier, factor):
    """Compared with the original of a later step, a candidate that missed the budget would fit."""
    wrong = scaled(frontier, 0.8)
    plan = choose(traced, wrong, "80%", drifting(factor), timer=QUICK)
    assert milliseconds(traced, plan.plan) <= 0.8 * milliseconds(traced, traced.vanilla)


def test_rejected_candidate_is_skipped(traced, frontier):
    wanted = choose(traced, frontier, "80%", COST, timer=QUICK)
    refused = COST.compile(sketch(rewrite(traced, wanted.plan)), tuple(traced.blueprint.inputs.args)).seconds()

    @dataclasses.dataclass(frozen=True, slots=True)
    class Picky(CostModel):
        def compile(self, module, inputs):
            compiled = CostModel.compile(self, module, inputs)
            if compiled.seconds() == pytest.approx(refused):
                raise BackendError("not this one")
            return compiled

    plan = choose(traced, frontier, "80%", Picky(), timer=QUICK)
    assert plan.importance < wanted.importance
    assert milliseconds(traced, plan.plan) <= 0.8 * milliseconds(traced, traced.vanilla)


def test_progress_bar_is_full_if_the_search_ends_early(traced, frontier):
    lines = []
    choose(traced, frontier, "80%", COST, timer=QUICK, steps=50, progress=progress_lines(lines.append, seconds=1e9))
    assert lines == ["candidates: 0 of 50", "candidates: 50 of 50, done"]


def test_wrong_types_of_network_and_frontier_are_refused(traced, frontier):
    bare = Network.loads(traced.network.dumps())
    for wrong, found in ((nn.Conv2d(3, 4, 1), "Conv2d"), (None, "NoneType"), (bare, "a Network without a model")):
        with pytest.raises(InvalidValue, match=rf"choose\(\) takes a TracedNetwork, found {found}"):
            choose(wrong, frontier, "80%", COST, timer=QUICK)
        with pytest.raises(InvalidValue, match=rf"measure_latency\(\) takes a TracedNetwork, found {found}"):
            measure_latency(wrong, COST, timer=QUICK)
    with pytest.raises(InvalidValue, match=r"the frontier that solve\(\) returns, found SolvedPlan"):
        choose(traced, frontier[0], "80%", COST, timer=QUICK)
    with pytest.raises(InvalidValue, match="The number of steps must be an integer of at least 1, found '3'"):
        choose(traced, frontier, "80%", COST, timer=QUICK, steps="3")


def test_zero_steps_and_frontier_of_another_network_are_refused(traced, frontier):
    with pytest.raises(InvalidValue, match="The number of steps must be an integer of at least 1, found 0"):
        choose(traced, frontier, "80%", COST, timer=QUICK, steps=0)
    with pytest.raises(TableError, match="The frontier is of another network"):
        choose(traced, dataclasses.replace(frontier, fingerprint="0123456789abcdef"), "80%", COST, timer=QUICK)


@pytest.mark.parametrize("factor", [3.0, 0.5])
@pytest.mark.parametrize("budget", ["90%", "75%"])
def test_frontier_made_at_another_speed_is_read_in_shares(traced, frontier, factor, budget):
    """The machine was slower or faster when the table was made: the first candidate is the same."""
    then = dataclasses.replace(scaled(frontier, factor), original=factor * frontier.original)
    plan = choose(traced, then, budget, COST, timer=QUICK, steps=1).plan
    assert plan == choose(traced, frontier, budget, COST, timer=QUICK, steps=1).plan
    assert plan not in (frontier[0].plan, frontier[-1].plan)


def test_original_that_cannot_be_built_is_an_error(traced, frontier):
    @dataclasses.dataclass(frozen=True, slots=True)
    class Broken(CostModel):
        def compile(self, module, inputs):
            raise OutOfMemory("no room.")

    with pytest.raises(OutOfMemory, match=r"The original network cannot be timed: .*no room\. Run again"):
        choose(traced, frontier, "80%", Broken(), timer=QUICK)
