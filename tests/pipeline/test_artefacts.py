"""The tables of a run are reused if their inputs are the same, and otherwise made again or refused."""

import dataclasses
import inspect
import warnings

import pytest

import depthfold as df
from depthfold.core import FlaggedSpan
from depthfold.errors import JournalError, RunError
from depthfold.importance import IncompleteTable, importance_plan
from depthfold.pipeline import Options
from depthfold.pipeline.artefacts import (
    chosen_plan,
    find_findings,
    keep_findings,
    keep_importance,
    make_importance_table,
    make_latency_table,
    student_folder,
)
from depthfold.pipeline.options import HELP
from depthfold.stage_one import SAVES_NO_TIME
from depthfold.store import RunFolder
from depthfold.store.run_folder import PLAN, RESULT
from runs import made_up_run
from tables import latency_table
from tiny_importance import RECIPE, TinyTask, scores_in, tiny_network, trainings_in

TRACED = tiny_network()
OPTIONS = Options(importance_method="trained", importance_recipe=RECIPE)


def silent(what, total, done=0):
    return lambda: None


@pytest.fixture
def folder(tmp_path):
    return RunFolder.open(tmp_path / "run")


def importance(folder, task, latency=None, **changes):
    return make_importance_table(folder, TRACED, task, dataclasses.replace(OPTIONS, **changes), silent, latency)


def test_a_finished_importance_table_is_reused_without_its_journal(folder, tmp_path):
    task = TinyTask(folder=str(tmp_path))
    table, trained = importance(folder, task), trainings_in(tmp_path)
    (folder.path / "importance.jsonl").unlink()
    assert importance(folder, task) == table and trainings_in(tmp_path) == trained


def test_an_importance_table_of_other_inputs_is_not_reused(folder):
    importance(folder, TinyTask())
    for changes in (
        {"importance_recipe": RECIPE.replace(lr=0.1)},
        {"reinit": False},
        {"importance_method": "brief"},
    ):
        with pytest.raises(JournalError, match="was made from other inputs"):
            importance(folder, TinyTask(), **changes)
    with pytest.raises(JournalError, match="task: tiny there, other here"):
        importance(folder, TinyTask(identity="other"))


def times(fast):
    """Return a latency table in which merging saves time only for this span."""
    return latency_table({(s.i, s.j): 0.5 if (s.i, s.j) == fast else float(len(s)) for s in TRACED.spans()})


def test_blocks_left_out_for_another_latency_table_are_measured_when_they_are_needed(folder, tmp_path):
    task, method = TinyTask(folder=str(tmp_path)), {"importance_method": "recalibrated"}

    def left_out(table):
        return {entry.span for entry in table.entries if entry.reason == SAVES_NO_TIME}

    one, measured = importance(folder, task, times((1, 3)), **method), scores_in(tmp_path)
    assert importance(folder, task, times((1, 3)), **method) == one and scores_in(tmp_path) == measured
    (folder.path / "importance.jsonl").rename(tmp_path / "moved")
    # A finished table is reused although some entries have a reason, also with other times that leave out the same.
    slower = dataclasses.replace(times((1, 3)), entries=[
        dataclasses.replace(entry, times=tuple(2 * time for time in entry.times)) for entry in times((1, 3)).entries
    ])  # fmt: skip
    assert importance(folder, task, slower, **method) == one and scores_in(tmp_path) == measured
    (tmp_path / "moved").rename(folder.path / "importance.jsonl")
    two = importance(folder, task, times((3, 5)), **method)
    new = left_out(one) - left_out(two)
    assert {(block.i, block.j) for block in new} == {(1, 5), (3, 5)}  # (1, 5] can merge its last two layers
    assert len(scores_in(tmp_path)) == len(measured) + len(new)
    assert not left_out(importance(folder, task, **method))


def test_a_table_that_the_user_gave_is_replaced_when_one_is_measured(folder):
    measured = importance(folder, TinyTask())
    given = dataclasses.replace(measured, provenance="given")
    keep_importance(folder, given)
    assert folder.made_from("importance.json").keys() == {"given table"}
    assert importance(folder, TinyTask()) == measured


def test_a_table_with_failures_warns_again_and_retry_repeats_them(folder, tmp_path):
    plan = importance_plan(TRACED.network, FlaggedSpan(0, 3, True, True))
    task = TinyTask(folder=str(tmp_path), fates=((plan, "nan"),))
    for _ in range(2):
        with pytest.warns(IncompleteTable, match="could not be measured"):
            table = importance(folder, task)
    assert any(entry.reason for entry in table.entries)
    (tmp_path / "repaired").touch()
    with warnings.catch_warnings():
        warnings.simplefilter("error", IncompleteTable)
        whole = importance(folder, task, retry=True)
    assert not any(entry.reason for entry in whole.entries)
    assert folder.read("importance.json", df.ImportanceTable) == whole


def test_a_latency_table_is_reused_and_another_space_is_measured(folder):
    table = make_latency_table(folder, TRACED, "cost_model", OPTIONS, silent)
    assert folder.made_from("latency.json")["space"] == "paper"
    (folder.path / "latency.jsonl").unlink()
    assert make_latency_table(folder, TRACED, "cost_model", OPTIONS, silent) == table
    assert not (folder.path / "latency.jsonl").exists()
    make_latency_table(folder, TRACED, "cost_model", dataclasses.replace(OPTIONS, space="full"), silent)
    assert folder.made_from("latency.json")["space"] == "full"


def test_each_plan_recipe_and_teacher_has_its_own_student(folder):
    one, two = TRACED.vanilla, df.Plan((), ())
    folders = {
        student_folder(folder, plan, recipe, distil=distil)
        for plan in (one, two)
        for recipe in (RECIPE, RECIPE.replace(lr=0.1), "quick")
        for distil in (True, False)
    }
    assert len(folders) == 12 and {path.parent for path in folders} == {folder.path / "students"}
    assert student_folder(folder, df.Plan((), ()), RECIPE.replace(), distil=True) in folders


def test_a_plan_without_a_record_is_not_chosen_yet(folder):
    with pytest.raises(RunError, match=r"has no plan.json yet. Run: depthfold solve"):
        chosen_plan(folder, "depthfold solve")


def test_findings_depend_on_the_plan_and_on_the_result(folder):
    findings = made_up_run()
    for name in (PLAN, RESULT):
        keep_findings(folder, findings)
        assert find_findings(folder) == findings
        with folder.making(name, {"made": "now"}):
            pass
        assert find_findings(folder) is None


def test_options_describe_themselves_and_compress_has_at_most_ten_parameters():
    for field in dataclasses.fields(Options):
        assert field.metadata[HELP].endswith("."), field.name
    assert len(inspect.signature(df.compress).parameters) <= 10
