"""Trainings that fail for good: the table says which and why, is whole otherwise, and the solver goes round them."""

from __future__ import annotations

import warnings
from itertools import pairwise
from statistics import fmean

import pytest

import depthfold as df
from depthfold.core import FlaggedSpan, Frontier, Score
from depthfold.importance import IncompleteTable, importance_plan, measure_importance
from depthfold.jobs import Processes
from tables import latency_table
from tiny_importance import RECIPE, TinyTask, scores_in, tiny_network, trainings_in

NETWORK = tiny_network()
FAILING = {
    FlaggedSpan(0, 4, True, True): (
        "nan",
        "not finite: The loss is nan at step 2 of 3, with the learning rate 0.0375.",
    ),
    FlaggedSpan(1, 3, True, False): ("too large", "out of memory: CUDA out of memory. Tried to allocate 2.00 GiB"),
    FlaggedSpan(3, 5, False, True): ("dies", "worker lost: its process ended with exit code 3"),
}


@pytest.fixture(scope="module")
def whole():
    return measure_importance(NETWORK, TinyTask(), RECIPE)


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """The folder, the task, and the table with the three failures, with the warning that came with it."""
    folder = tmp_path_factory.mktemp("failed")
    fates = tuple((importance_plan(NETWORK.network, block), fate) for block, (fate, _) in FAILING.items())
    task = TinyTask(folder=str(folder), fates=fates)
    with pytest.warns(IncompleteTable) as told:
        table = measure_importance(NETWORK, task, RECIPE, executor=Processes(workers=2), run=folder / "run")
    return folder, task, table, told


def test_the_table_says_what_failed_and_is_whole_otherwise(failed, whole):
    folder, _, table, _ = failed
    for entry, right in zip(table.entries, whole.entries, strict=True):
        if entry.span in FAILING:
            assert entry.reason.startswith(FAILING[entry.span][1])
            assert entry.samples == ()
        else:
            assert entry == right
    assert table.base == whole.base
    assert df.ImportanceTable.loads(table.dumps()) == table
    # Fifteen once; NaN would come again, a lack of memory is tried once more, a lost worker twice.
    assert trainings_in(folder) == 15 + 1 + 2 + 3


def test_the_warning_names_them_and_where_the_caller_stands(failed):
    *_, told = failed
    (warning,) = [each for each in told if each.category is IncompleteTable]
    lines = str(warning.message).splitlines()
    assert lines[0] == "3 blocks of 18 could not be trained, and no plan will use them:"
    for line, (block, (_, reason)) in zip(lines[1:4], FAILING.items(), strict=True):
        assert line.startswith(f"  {block}: {reason}")
    assert lines[4:] == [
        "To try just these, run it again with retry=True and the same run=..., or with --retry on the command line."
    ]
    assert warning.filename == __file__


def blocks_of(plan):
    """The blocks of the surrogate objective: between the boundaries, with an activation at their ends or not."""
    ends = sorted({0, *plan.boundaries, NETWORK.depth})
    return [FlaggedSpan(i, j, i == 0 or i in plan.activations, j in plan.activations) for i, j in pairwise(ends)]


def test_no_plan_uses_them_and_the_frontier_says_so(failed, whole):
    *_, table, _ = failed
    # Their spans are the fast ones: plans of the whole table use all three.
    fast = {block.span for block in FAILING}
    times = latency_table({(span.i, span.j): 0.01 if span in fast else len(span) for span in NETWORK.spans()})
    best = df.solve(times, whole, network=NETWORK.network, alpha=1.6)
    assert FAILING.keys() <= {block for plan in best for block in blocks_of(plan)}
    assert best.unscored == ()
    assert "without a score" not in str(best)

    frontier = df.solve(times, table, network=NETWORK.network, alpha=1.6)
    importances = table.importances
    shift = 1.6 * fmean(value for block, value in importances.items() if len(block.span) == 1)
    for plan in frontier:
        assert not FAILING.keys() & set(blocks_of(plan))
        assert plan.importance == pytest.approx(sum(importances[block] - shift for block in blocks_of(plan)))
    assert frontier.unscored == tuple(FAILING)
    said = "3 blocks without a score, used by no plan: (0, 4], flags 11; (1, 3], flags 10; (3, 5], flags 01"
    assert said in str(frontier).splitlines()
    assert Frontier.loads(frontier.dumps()) == frontier


def test_many_blocks_without_a_score_are_counted(whole):
    entries = [
        entry if len(entry.span.span) == 1 else Score(span=entry.span, reason="worker lost: gone")
        for entry in whole.entries
    ]
    times = latency_table({(span.i, span.j): len(span) for span in NETWORK.spans()})
    frontier = df.solve(times, df.ImportanceTable(entries=entries, base=whole.base))
    assert str(frontier).splitlines()[2].startswith("10 blocks without a score, used by no plan: (0, 3], flags 11; ")
    assert str(frontier).splitlines()[2].endswith("; (1, 3], flags 11 and 5 more")


def test_retry_runs_just_these_again(failed, whole):
    folder, task, table, _ = failed
    run = folder / "run"
    before = trainings_in(folder), scores_in(folder)
    with pytest.warns(IncompleteTable):  # what failed for good stays so, unless it is to be tried again
        # By a worker, which nobody needs: a training that came back would end this process.
        assert measure_importance(NETWORK, task, RECIPE, executor=Processes(workers=1), run=run) == table
    assert (trainings_in(folder), scores_in(folder)) == before
    (folder / "mended").touch()
    with warnings.catch_warnings():
        warnings.simplefilter("error", IncompleteTable)
        again = measure_importance(NETWORK, task, RECIPE, run=run, retry=True)
    assert again == whole
    assert trainings_in(folder) == before[0] + len(FAILING)
    assert set(scores_in(folder).values()) == {1}
    assert measure_importance(NETWORK, task, RECIPE, run=run, retry=True) == whole
    assert trainings_in(folder) == before[0] + len(FAILING)
