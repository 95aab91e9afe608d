"""fit_surrogate(): which plans are trained, the journal, failures, and the stage of compress()."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import pytest
import torch

import depthfold as df
from depthfold.core import ImportanceTable, LatencyTable, Move, Score, Surrogate, Timing
from depthfold.errors import InvalidValue, JournalError, TableError
from depthfold.importance.journal import ImportanceJournal
from depthfold.jobs import Failure, Outcome, Processes
from depthfold.pipeline import artefacts, fit_surrogate
from depthfold.pipeline.options import Options
from depthfold.pipeline.preflight import checked_options
from depthfold.pipeline.surrogate import plans_along_frontier, surrogate_depends_on
from depthfold.store import RunFolder
from depthfold.store.run_folder import SURROGATE_JOURNAL
from depthfold.tracing import student_parts
from depthfold.training import FunctionTask
from tables import tables_with_moves
from tiny_importance import RECIPE, SIZE, Pair, TinyTask, tiny_network, trainings_in

TRACED = tiny_network()
NETWORK = TRACED.network


def removed(block):
    return len(set(NETWORK.activations) & set(range(block.i + 1, block.j)))


LATENCY = LatencyTable(
    entries=[Timing(span=span, times=(1 + 0.1 * len(span) + 0.01 * span.j,) * 2) for span in NETWORK.spans()]
)
IMPORTANCE = ImportanceTable(
    entries=tuple(Score(span=b, samples=(-2.0 * removed(b) - 0.01 * b.j,)) for b in TRACED.flagged_spans())
)


@dataclass(frozen=True, kw_only=True)
class Counting(TinyTask):
    """Its score is 10 for each activation of the student, plus 1 for each segment."""

    def score(self, model, split):
        super().score(model, split)  # writes the log
        plan = student_parts(model)[1].plan
        return 10.0 * len(plan.activations) + len(plan.cuts) + 1


def test_plans_are_different_and_lie_along_the_frontier():
    plans = plans_along_frontier(TRACED, LATENCY, IMPORTANCE, 6)
    assert len({one.plan for one in plans}) == len(plans) <= 6
    frontier = df.solve(LATENCY, IMPORTANCE, network=NETWORK)
    known = {solved.plan: solved for solved in frontier}
    own = [one for one in plans if one.plan in known]
    assert {frontier[0].plan, frontier[-1].plan} <= {one.plan for one in plans}
    for one in own:
        assert one.importance == pytest.approx(known[one.plan].importance)
        assert one.blocks == len(known[one.plan].boundaries) + 1
    assert len({one.blocks for one in plans}) > 1


def test_scores_of_trained_plans_are_journalled_and_resumed(tmp_path):
    task, run = Counting(folder=str(tmp_path)), tmp_path / "run"
    found = fit_surrogate(TRACED, task, LATENCY, IMPORTANCE, RECIPE, plans=5, run=run)
    assert [one.score for one in found.plans] == [
        10.0 * len(one.plan.activations) + len(one.plan.cuts) + 1 for one in found.plans
    ]
    number = trainings_in(tmp_path)
    assert number == len(found.plans) >= 4
    assert fit_surrogate(TRACED, task, LATENCY, IMPORTANCE, RECIPE, plans=5, run=run) == found
    assert trainings_in(tmp_path) == number
    with pytest.raises(JournalError, match=r"recipe.steps: 3 there, 4 here"):
        fit_surrogate(TRACED, task, LATENCY, IMPORTANCE, RECIPE.replace(steps=4), plans=5, run=run)
    assert Surrogate.loads(found.dumps()) == found


@pytest.mark.slow
def test_worker_processes_give_the_same_surrogate(tmp_path):
    one = fit_surrogate(TRACED, Counting(), LATENCY, IMPORTANCE, RECIPE, plans=4)
    two = fit_surrogate(TRACED, Counting(), LATENCY, IMPORTANCE, RECIPE, plans=4, executor=Processes(workers=2))
    assert one == two


def test_students_are_distilled_from_the_original():
    seen = []

    def loss(model, step):
        x = torch.randn(4, 2, 6, 6, generator=step.generator())
        seen.append((x, step.teacher(x)))
        return model(x).square().mean()

    task = FunctionTask(loss=loss, score=lambda model, split: len(student_parts(model)[1].plan.activations))
    fit_surrogate(TRACED, task, LATENCY, IMPORTANCE, RECIPE.replace(steps=1), plans=4)
    original = df.rewrite(TRACED, TRACED.vanilla).eval()
    assert len(seen) == 4
    for x, output in seen:
        assert torch.equal(output, original(x))


def test_failed_plans_are_left_out_and_too_many_are_an_error(tmp_path):
    plans = [one.plan for one in plans_along_frontier(TRACED, LATENCY, IMPORTANCE, 6)]
    task = Counting(folder=str(tmp_path), fates=((plans[0], "nan"),))
    found = fit_surrogate(TRACED, task, LATENCY, IMPORTANCE, RECIPE, plans=6, run=tmp_path / "one")
    assert [one.plan for one in found.plans] == plans[1:]
    task = Counting(folder=str(tmp_path), fates=tuple((plan, "nan") for plan in plans[1:]))
    with pytest.raises(TableError, match=r"plans of \d could not be trained. The first failure: not finite: The loss"):
        fit_surrogate(TRACED, task, LATENCY, IMPORTANCE, RECIPE, plans=6, run=tmp_path / "two")


def test_too_few_plans_are_an_error_before_any_is_trained(tmp_path):
    pair = df.trace(Pair(), torch.zeros(1, 2, SIZE, SIZE))
    latency = LatencyTable(entries=[Timing(span=span, times=(1.0, 1.0)) for span in pair.spans()])
    blocks = pair.flagged_spans()
    importance = ImportanceTable(entries=tuple(Score(span=b, samples=(-1.0 * len(b.span) ** 2,)) for b in blocks))
    task = Counting(folder=str(tmp_path))
    with pytest.raises(
        TableError, match=r"^The tables yield only 2 different plans, and a surrogate is fitted to at le"
    ):
        fit_surrogate(pair, task, latency, importance, RECIPE)
    assert not trainings_in(tmp_path)
    unscored = ImportanceTable(entries=tuple(Score(span=b, reason="failed") for b in blocks))
    with pytest.raises(TableError, match=r"^The spans of the importance table do not cover the network"):
        fit_surrogate(pair, task, latency, unscored, RECIPE)


def test_too_few_trained_plans_have_the_reason_of_one_of_them(tmp_path):
    plans, run = [one.plan for one in plans_along_frontier(TRACED, LATENCY, IMPORTANCE, 5)], tmp_path / "run"
    with ImportanceJournal(run, surrogate_depends_on(TRACED, Counting(), RECIPE), name=SURROGATE_JOURNAL) as journal:
        journal.add(Outcome(key="other", failure=Failure(kind="error", message="of another plan")))
    task = Counting(folder=str(tmp_path), fates=tuple((plan, "nan") for plan in plans[:2]))
    # Three of five are more than half, but fewer than a fit needs.
    with pytest.raises(
        TableError, match=r"^2 plans of 5 could not be trained. The first failure: not finite: The loss"
    ):
        fit_surrogate(TRACED, task, LATENCY, IMPORTANCE, RECIPE, plans=5, run=run)


def test_bad_arguments_are_refused():
    with pytest.raises(InvalidValue, match="The number of plans"):
        fit_surrogate(TRACED, Counting(), LATENCY, IMPORTANCE, RECIPE, plans=3)
    with pytest.raises(InvalidValue, match="takes the place of alpha"):
        checked_options(Options(alpha=1.6, surrogate=True))


def test_surrogate_of_a_run_is_reused_for_the_same_tables(tmp_path, monkeypatch):
    folder, task = RunFolder.open(tmp_path / "run"), Counting(folder=str(tmp_path))
    monkeypatch.setattr(artefacts, "preset", lambda name: RECIPE)
    first = artefacts.make_surrogate(folder, TRACED, task, (LATENCY, IMPORTANCE), Options(), None)
    number = trainings_in(tmp_path)
    assert artefacts.make_surrogate(folder, TRACED, task, (LATENCY, IMPORTANCE), Options(), None) == first
    assert trainings_in(tmp_path) == number
    worse = ImportanceTable(entries=tuple(
        Score(span=entry.span, samples=(2 * entry.mean,)) for entry in IMPORTANCE.entries))  # fmt: skip
    assert artefacts.make_surrogate(folder, TRACED, task, (LATENCY, worse), Options(), None) != first


def test_plans_with_drops_are_trained_each_by_itself(tmp_path):
    """Two plans that differ only in what they drop have two lines in the journal."""
    latency, importance = tables_with_moves(NETWORK, "paper", get_args(Move), seed=2)
    task = Counting(folder=str(tmp_path))
    surrogate = fit_surrogate(TRACED, task, latency, importance, RECIPE, run=tmp_path / "run")
    plans = [each.plan for each in surrogate.plans]
    assert len(plans) == len(set(plans))
    assert len({(plan.activations, plan.cuts) for plan in plans}) < len(plans)
    lines = (tmp_path / "run" / SURROGATE_JOURNAL).read_text().splitlines()
    assert len(lines) == len(plans) + 1
    assert Surrogate.loads(surrogate.dumps()) == surrogate
