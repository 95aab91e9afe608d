"""A second command on a finished run: what has changed is done again, what has not is reused, nothing is lost."""

import html
import importlib
import json
import multiprocessing
import shutil
import sys

import pytest
import torch
from safetensors.torch import save_file

from cli_workshop import depthfold, refused
from depthfold.core import ImportanceTable
from depthfold.pipeline.choice import Choice
from depthfold.pipeline.models import model_of
from depthfold.reporting import Findings
from depthfold.store import RunFolder

WEIGHTS = "result/model.safetensors"


def trainings(run):
    return sorted(path.parent.name for path in run.glob("students/*/finetuning"))


def done(*arguments):
    result = depthfold(*arguments)
    assert result.exit_code == 0, result.output
    return result


def test_another_budget_is_another_student_and_the_first_is_kept(run):
    before, weights = trainings(run), (run / WEIGHTS).read_bytes()
    done("compress", "--run", run, "--budget", "100%")
    assert len(before) == 1 and len(trainings(run)) == 2 and set(before) < set(trainings(run))
    assert (run / WEIGHTS).read_bytes() != weights
    assert 'budget = "100%"' in (run / "config.toml").read_text()
    done("compress", "--run", run, "--budget", "80%")
    assert len(trainings(run)) == 2  # the first is only read
    assert (run / WEIGHTS).read_bytes() == weights


def test_another_recipe_or_teacher_is_another_training(run, tmp_path):
    (tmp_path / "recipe.toml").write_text("steps = 3\nbatch = 8\n")
    for arguments in (("--recipe", tmp_path / "recipe.toml"), ("--no-distil",)):
        before, weights = trainings(run), (run / WEIGHTS).read_bytes()
        done("compress", "--run", run, *arguments)
        assert len(trainings(run)) == len(before) + 1
        assert (run / WEIGHTS).read_bytes() != weights


def test_other_data_is_refused_for_the_same_training(run, workshop, tmp_path):
    text = (workshop / "net.py").read_text().replace("holdout=0.25", "holdout=0.5")
    (tmp_path / "other.py").write_text(text)
    said = refused("finetune", "--run", run, "--data", f"{tmp_path / 'other.py'}:data")
    assert "holdout 0.25" in said and "holdout 0.5" in said and "students" in said


def test_a_plan_is_the_same_whatever_its_milliseconds(run):
    """A table that was measured again has other figures; the plan that they lead to is trained already."""
    choice = Choice.loads((run / "choice.json").read_text()).to_json()
    choice["plan"]["latency"] *= 1.01
    (run / "choice.json").write_text(json.dumps(choice))
    before = trainings(run)
    done("finetune", "--run", run)
    assert trainings(run) == before


def test_other_importances_are_another_frontier(run, tmp_path):
    """Both tables lead to frontiers with the same ends; between them another plan is the best."""
    table = ImportanceTable.loads((run / "importance.json").read_text()).to_json()
    plans = []
    for good in ((0, 2), (1, 3)):
        for entry in table["entries"]:
            ends = entry["span"]["i"], entry["span"]["j"]
            loss = 0 if ends[1] - ends[0] == 1 else 20 if ends == (0, 3) else 1 if ends == good else 8
            entry |= {"samples": [table["base"] - loss], "curves": []}
        (tmp_path / "table.json").write_text(json.dumps(table))
        done("solve", "--run", run, "--importance", tmp_path / "table.json", "--budget", "95%")
        plans.append(Choice.loads((run / "choice.json").read_text()).plan)
    assert plans[0].segments != plans[1].segments
    assert [len(segment.span) for segment in plans[0].segments] == [2, 1]
    assert [len(segment.span) for segment in plans[1].segments] == [1, 2]


def test_other_weights_are_refused_by_every_stage_that_depends_on_them(run, workshop, tmp_path):
    model = model_of(f"{workshop / 'net.py'}:model", None)
    torch.nn.init.constant_(model[-1].bias, 0.25)
    weights = tmp_path / "other.safetensors"
    save_file(model.state_dict(), weights)
    for command in ("importance", "solve", "finetune", "merge", "report", "compress"):
        said = refused(command, "--run", run, "--weights", weights)
        assert "belongs to other weights of this network" in said, command
    assert "other.safetensors" not in (run / "config.toml").read_text()
    done("profile", "--run", run, "--weights", weights)  # which depends on none, and only looks


def test_a_result_that_is_new_has_no_old_findings(run, monkeypatch):
    """Stopped between the new result and the report, the next report tells of the new result."""
    old = Findings.loads((run / "findings.json").read_text())
    shutil.rmtree(run / "students")

    def interrupted(*_):
        raise KeyboardInterrupt

    # The attribute of that name is the function.
    monkeypatch.setattr(importlib.import_module("depthfold.pipeline.compression"), "export", interrupted)
    assert depthfold("compress", "--run", run, "--no-distil").exit_code == 130
    assert not (run / "findings.json").exists()
    monkeypatch.undo()
    done("compress", "--run", run, "--no-distil")
    assert Findings.loads((run / "findings.json").read_text()).plan == old.plan


def test_a_report_on_another_target_is_measured_again(run, tmp_path):
    shutil.copy(run / "importance.json", tmp_path / "given.json")
    shutil.copy(run / "findings.json", run.parent / "kept.json")
    done("solve", "--run", run, "--importance", tmp_path / "given.json")  # which the run keeps, as the demo's does
    (tmp_path / "other.toml").write_text('target = "cost_model:launch_us=1.0"\n')
    for asked in (("--target", "cost_model:launch_us=1.0"), ("--config", tmp_path / "other.toml")):
        (run / "findings.json").write_bytes((run.parent / "kept.json").read_bytes())
        done("report", "--run", run, *asked)
        findings = Findings.loads((run / "findings.json").read_text())
        assert "launch_us=1" in findings.environment.runtime
        assert findings.title == (
            "Sequential at 80% on cost_model, examined in another environment (cost_model:launch_us=1.0)"
        )
        assert 'target = "cost_model"' in (run / "config.toml").read_text()
    page = html.unescape((run / "report.html").read_text())
    assert "was measured in another environment than these networks (runtime: cost_model against" in page
    assert "the prediction is off by" not in page
    done("report", "--run", run, "--target", "cost_model")
    page = html.unescape((run / "report.html").read_text())
    assert "the prediction is off by" in page and "in another environment" not in page


@pytest.mark.parametrize("command", ["inspect", "profile"])
def test_commands_that_only_look_leave_the_run_as_it_is(command, run):
    kept = (run / "config.toml").read_bytes()
    more = ("--target", "cost_model:launch_us=1.0") if command == "profile" else ("--batch", "3")
    done(command, "--run", run, *more)
    assert (run / "config.toml").read_bytes() == kept


def test_two_processes_in_one_run(run):
    ready, go = multiprocessing.Event(), multiprocessing.Event()
    other = multiprocessing.Process(target=_hold, args=(run, ready, go))
    other.start()
    try:
        assert ready.wait(60)
        table = (run / "importance.json").read_bytes()
        (run.parent / "given.json").write_text(
            json.dumps(ImportanceTable.loads(table.decode()).to_json() | {"provenance": "another"})
        )
        refused("solve", "--run", run, "--importance", run.parent / "given.json")
        assert (run / "importance.json").read_bytes() == table
        for command in ("latency", "importance", "solve", "finetune", "merge", "export", "report", "compress"):
            assert "is in use by another process" in refused(command, "--run", run), command
    finally:
        go.set()
        other.join()
    done("export", "--run", run)


def _hold(run, ready, go):
    with RunFolder.at(run).lock():
        ready.set()
        go.wait(60)


def test_a_run_that_is_not_there_is_not_made(tmp_path):
    for command in ("solve", "report"):
        assert "There is no run folder" in refused(command, "--run", tmp_path / "typo")
    assert not (tmp_path / "typo").exists()


def test_what_is_missing_at_the_end_is_said_at_the_beginning(workshop, tmp_path, monkeypatch):
    for library in ("onnx", "plotly"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, library, None)
            arguments = ("--config", workshop / "tiny.toml", "--run", tmp_path / library, "--export", "model.onnx")
            assert f"{library} is not installed" in refused("compress", *arguments)
        assert not (tmp_path / library / "latency.jsonl").exists()
