"""Failed trainings: the table contains their reasons, and the solver does not use their blocks."""

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
    return measure_importance(NETWORK, TinyTask(), RECIPE, method="trained")


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """Return the folder, the task, the table with three failures, and the warnings."""
    folder = tmp_path_factory.mktemp("failed")
    fates = tuple((importance_plan(NETWORK.network, block), fate) for block, (fate, _) in FAILING.items())
    task = TinyTask(folder=str(folder), fates=fates)
    with pytest.warns(IncompleteTable) as caught:
        table = measure_importance(
            NETWORK, task, RECIPE, executor=Processes(workers=2), run=folder / "run", method="trained"
        )
    return folder, task, table, caught


@pytest.mark.slow
def test_table_contains_reasons_and_all_other_scores(failed, whole):
    folder, _, table, _ = failed
    for entry, right in zip(table.entries, whole.entries, strict=True):
        if entry.span in FAILING:
            assert entry.reason.startswith(FAILING[entry.span][1])
            assert entry.samples == ()
        else:
            assert entry == right
    assert table.base == whole.base
    assert df.ImportanceTable.loads(table.dumps()) == table
    # Fifteen once. NaN is not retried, out of memory is retried once, a lost worker twice.
    assert trainings_in(folder) == 15 + 1 + 2 + 3


@pytest.mark.slow
def test_warning_lists_the_failures_and_points_to_the_caller(failed):
    *_, caught = failed
    (warning,) = [each for each in caught if each.category is IncompleteTable]
    lines = str(warning.message).splitlines()
    assert lines[0] == "3 blocks of 18 could not be measured; no plan will use them:"
    for line, (block, (_, reason)) in zip(lines[1:4], FAILING.items(), strict=True):
        assert line.startswith(f"  {block}: {reason}")
    assert lines[4:] == [
        "To run only these again, use retry=True with the same run=..., or --retry on the command line."
    ]
    assert warning.filename == __file__


def blocks_of(plan):
    """Return the blocks of the surrogate objective (Eq. 15): between the boundaries, with their flags."""
    ends = sorted({0, *plan.boundaries, NETWORK.depth})
    A = plan.plan.activations
    return [FlaggedSpan(i, j, i == 0 or i in A, j in A) for i, j in pairwise(ends)]


@pytest.mark.slow
def test_no_plan_uses_unscored_blocks_and_the_frontier_lists_them(failed, whole):
    *_, table, _ = failed
    # Their spans are fast, so that plans of the complete table use all three.
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
    line = "3 blocks without a score, used by no plan: (0, 4], flags 11; (1, 3], flags 10; (3, 5], flags 01"
    assert line in str(frontier).splitlines()
    assert Frontier.loads(frontier.dumps()) == frontier


def test_long_list_of_unscored_blocks_is_shortened(whole):
    entries = [
        entry if len(entry.span.span) == 1 else Score(span=entry.span, reason="worker lost: gone")
        for entry in whole.entries
    ]
    times = latency_table({(span.i, span.j): len(span) for span in NETWORK.spans()})
    frontier = df.solve(times, df.ImportanceTable(entries=entries, base=whole.base))
    assert str(frontier).splitlines()[2].startswith("10 blocks without a score, used by no plan: (0, 3], flags 11; ")
    assert str(frontier).splitlines()[2].endswith("; (1, 3], flags 11 and 5 more")


@pytest.mark.slow
def test_retry_runs_only_failed_trainings(failed, whole):
    folder, task, table, _ = failed
    run = folder / "run"
    before = trainings_in(folder), scores_in(folder)
    with pytest.warns(IncompleteTable):  # failures are not retried without retry=True
        # In a worker: if the training ran again, it would end this process.
        assert (
            measure_importance(NETWORK, task, RECIPE, executor=Processes(workers=1), run=run, method="trained") == table
        )
    assert (trainings_in(folder), scores_in(folder)) == before
    (folder / "repaired").touch()
    with warnings.catch_warnings():
        warnings.simplefilter("error", IncompleteTable)
        again = measure_importance(NETWORK, task, RECIPE, run=run, retry=True, method="trained")
    assert again == whole
    assert trainings_in(folder) == before[0] + len(FAILING)
    assert set(scores_in(folder).values()) == {1}
    assert measure_importance(NETWORK, task, RECIPE, run=run, retry=True, method="trained") == whole
    assert trainings_in(folder) == before[0] + len(FAILING)
