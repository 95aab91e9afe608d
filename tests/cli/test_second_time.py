"""A second command on a finished run: what has changed is done again, everything else is reused."""

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
from depthfold.core import ImportanceTable, SolvedPlan
from depthfold.reporting import Findings
from depthfold.settings.models import make_model
from depthfold.store import RunFolder

WEIGHTS = "result/model.safetensors"


def trainings(run):
    return sorted(path.parent.name for path in run.glob("students/*/finetuning"))


def done(*arguments):
    result = depthfold(*arguments)
    assert result.exit_code == 0, result.output
    return result


def test_another_budget_trains_another_student_and_keeps_the_first(run):
    before, weights = trainings(run), (run / WEIGHTS).read_bytes()
    done("compress", "--run", run, "--budget", "100%")
    assert len(before) == 1 and len(trainings(run)) == 2 and set(before) < set(trainings(run))
    assert (run / WEIGHTS).read_bytes() != weights
    assert 'budget = "100%"' in (run / "config.toml").read_text()
    done("compress", "--run", run, "--budget", "80%")
    assert len(trainings(run)) == 2  # the first student is reused
    assert (run / WEIGHTS).read_bytes() == weights


def test_a_run_goes_on_with_the_method_that_it_has_used(workshop, tmp_path):
    """config.toml has every setting, so a run that was made with another default is not measured again."""
    run = tmp_path / "run"
    done("importance", "--config", workshop / "tiny.toml", "--method", "trained", "--run", run)
    before = [(run / f"importance.{end}").read_bytes() for end in ("json", "jsonl")]
    done("compress", "--run", run)
    done("compress", "--config", workshop / "tiny.toml", "--run", run)
    assert before == [(run / f"importance.{end}").read_bytes() for end in ("json", "jsonl")]


def test_files_of_an_earlier_result_are_named(run):
    done("export", "--run", run, "--export", "model.onnx")  # from now on the only export of the run
    assert "earlier result" not in done("compress", "--run", run).stderr
    done("export", "--run", run, "--export", "model.onnx", "--export", "files/model.onnx")
    done("export", "--run", run, "--export", "model.onnx")
    said = " ".join(done("compress", "--run", run, "--budget", "100%").stderr.split())
    assert "Exported from an earlier result" in said and ": files/model.onnx, model.pt2. Write each again" in said
    done("merge", "--run", run)
    assert (run / "report.html").exists() and (run / "findings.json").exists(), "of the same result"
    done("solve", "--run", run, "--budget", "80%")
    assert ", model.onnx, model.pt2. Write each again" in " ".join(done("merge", "--run", run).stderr.split())
    assert not (run / "report.html").exists() and not (run / "findings.json").exists()


def test_another_recipe_or_teacher_starts_another_training(run, tmp_path):
    (tmp_path / "recipe.toml").write_text("steps = 3\nbatch = 8\n")
    for arguments in (("--recipe", tmp_path / "recipe.toml"), ("--no-distil",)):
        before, weights = trainings(run), (run / WEIGHTS).read_bytes()
        done("compress", "--run", run, *arguments)
        assert len(trainings(run)) == len(before) + 1
        assert (run / WEIGHTS).read_bytes() != weights


def test_a_finished_run_does_not_need_its_recipe_file(run, tmp_path):
    (tmp_path / "recipe.toml").write_text("steps = 3\nbatch = 8\n")
    done("compress", "--run", run, "--recipe", tmp_path / "recipe.toml")
    (tmp_path / "recipe.toml").unlink()
    for command in ("export", "profile", "report", "compress"):
        done(command, "--run", run)


def test_other_data_are_refused_for_the_same_training(run, workshop, tmp_path):
    text = (workshop / "net.py").read_text().replace("holdout=0.25", "holdout=0.5")
    (tmp_path / "other.py").write_text(text)
    said = refused("finetune", "--run", run, "--data", f"{tmp_path / 'other.py'}:data")
    assert "holdout 0.25" in said and "holdout 0.5" in said and "students" in said


def test_a_plan_with_other_latencies_is_the_same_plan(run):
    """A table that is measured again has other numbers, but the same plan is already trained."""
    plan = json.loads((run / "plan.json").read_text())
    plan["latency"] *= 1.01
    (run / "plan.json").write_text(json.dumps(plan))
    before = trainings(run)
    done("finetune", "--run", run)
    assert trainings(run) == before


def test_other_importances_give_another_frontier(run, tmp_path):
    """Both frontiers have the same ends; between them the best plan differs."""
    table = ImportanceTable.loads((run / "importance.json").read_text()).to_json()
    plans = []
    for good in ((0, 2), (1, 3)):
        for entry in table["entries"]:
            ends = entry["span"]["i"], entry["span"]["j"]
            loss = 0 if ends[1] - ends[0] == 1 else 20 if ends == (0, 3) else 1 if ends == good else 8
            entry |= {"samples": [table["base"] - loss]}
        (tmp_path / "table.json").write_text(json.dumps(table))
        done("solve", "--run", run, "--importance", tmp_path / "table.json", "--budget", "95%")
        plans.append(SolvedPlan.loads((run / "plan.json").read_text()))
    assert plans[0].segments != plans[1].segments
    assert [len(segment.span) for segment in plans[0].segments] == [2, 1]
    assert [len(segment.span) for segment in plans[1].segments] == [1, 2]


def test_other_weights_are_refused_by_every_stage_that_depends_on_them(run, workshop, tmp_path):
    model = make_model(f"{workshop / 'net.py'}:model", None)
    torch.nn.init.constant_(model[-1].bias, 0.25)
    weights = tmp_path / "other.safetensors"
    save_file(model.state_dict(), weights)
    for command in ("importance", "solve", "finetune", "merge", "report", "compress"):
        said = refused(command, "--run", run, "--weights", weights)
        assert "belongs to other weights of this network" in said, command
    assert "other.safetensors" not in (run / "config.toml").read_text()
    done("profile", "--run", run, "--weights", weights)  # does not depend on the weights


def test_a_new_result_has_no_old_findings(run, monkeypatch):
    """After an interruption between result and report, the next report describes the new result."""
    old = Findings.loads((run / "findings.json").read_text())
    shutil.rmtree(run / "students")

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("depthfold.pipeline.shipping"), "export", interrupted)
    assert depthfold("compress", "--run", run, "--no-distil").exit_code == 130
    assert not (run / "findings.json").exists()
    monkeypatch.undo()
    done("compress", "--run", run, "--no-distil")
    assert Findings.loads((run / "findings.json").read_text()).plan == old.plan


def test_a_report_on_another_target_is_measured_again(run, tmp_path):
    shutil.copy(run / "importance.json", tmp_path / "given.json")
    shutil.copy(run / "findings.json", run.parent / "kept.json")
    done("solve", "--run", run, "--importance", tmp_path / "given.json")  # the run keeps this setting, as in the demo
    (tmp_path / "other.toml").write_text('target = "cost_model:launch_us=1.0"\n')
    for asked in (("--target", "cost_model:launch_us=1.0"), ("--config", tmp_path / "other.toml")):
        (run / "findings.json").write_bytes((run.parent / "kept.json").read_bytes())
        done("report", "--run", run, *asked)
        findings = Findings.loads((run / "findings.json").read_text())
        assert "launch_us=1" in findings.environment.runtime
        assert findings.title == (
            "Sequential at 80% on cost_model, evaluated in another environment (cost_model:launch_us=1.0)"
        )
        assert 'target = "cost_model"' in (run / "config.toml").read_text()
    page = html.unescape((run / "report.html").read_text())
    assert "was measured in a different environment from these networks (runtime: cost_model against" in page
    assert "The plan met its budget in another environment than this report's (runtime: cost_model against" in page
    assert "the prediction is off by" not in page
    done("report", "--run", run, "--target", "cost_model")
    page = html.unescape((run / "report.html").read_text())
    assert "the prediction is off by" in page and "in a different environment" not in page


def test_a_plan_for_another_target_needs_another_latency_table(run):
    asked = "--run", run, "--target", "cost_model:launch_us=1.0"
    assert "against cost_model:launch_us=1.0). Use another run folder, or delete" in refused("solve", *asked)
    for name in ("latency.json", "latency.jsonl"):
        (run / name).unlink()
    done("latency", *asked)  # the advice can be followed
    done("solve", *asked, "--budget", "100%")


def test_other_test_data_are_scored(run, workshop, tmp_path):
    """The data of the training are the same, so nothing is trained again."""
    text = (workshop / "net.py").read_text()
    (tmp_path / "other.py").write_text(text.replace("images[64:], labels[64:]", "images[64:80], labels[64:80]"))
    before = trainings(run)
    done("compress", "--run", run, "--data", f"{tmp_path / 'other.py'}:data")
    findings = Findings.loads((run / "findings.json").read_text())
    assert findings.score_after.images == 16 and trainings(run) == before


@pytest.mark.parametrize(
    "command",
    [("inspect", "--batch", "3"), ("inspect", "--space", "full"), ("profile", "--target", "cost_model:launch_us=1.0")],
)
def test_commands_that_only_read_leave_the_run_unchanged(command, run):
    names = ("config.toml", "run.json", "latency.json", "latency.jsonl")
    kept = [(run / name).read_bytes() for name in names]
    done(*command, "--run", run)
    assert [(run / name).read_bytes() for name in names] == kept


def test_two_processes_cannot_use_one_run(run):
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


def test_a_missing_run_folder_is_not_created(tmp_path):
    for command in ("solve", "report"):
        assert "There is no run folder" in refused(command, "--run", tmp_path / "typo")
    assert not (tmp_path / "typo").exists()


def test_libraries_that_are_needed_at_the_end_are_checked_at_the_start(workshop, tmp_path, monkeypatch):
    for library in ("onnx", "jinja2"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, library, None)
            arguments = ("--config", workshop / "tiny.toml", "--run", tmp_path / library, "--export", "model.onnx")
            assert f"{library} is not installed" in refused("compress", *arguments)
        assert not (tmp_path / library / "latency.jsonl").exists()
