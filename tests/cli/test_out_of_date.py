"""A result that is older than the plan or the student of its run is refused, and a run can outlive its data."""

import importlib
import json
from dataclasses import replace

import pytest

from cli_workshop import depthfold, refused
from depthfold.core import ImportanceTable, Surrogate
from depthfold.pipeline import artefacts
from depthfold.reporting import Findings

ELSEWHERE = ("--target", "cost_model:launch_us=1.0")


def done(*arguments):
    result = depthfold(*arguments)
    assert result.exit_code == 0, result.output
    return result


def cuts(document):
    found = json.loads(document.read_text())
    return found.get("plan", found)["cuts"]


@pytest.mark.parametrize(
    "command", [("export", "--export", "new.pt2"), ("profile",), ("report",), ("report", *ELSEWHERE)]
)
def test_a_result_of_another_plan_is_refused(command, run):
    done("solve", "--run", run, "--budget", "100%")
    done("finetune", "--run", run)
    assert cuts(run / "plan.json") != cuts(run / "result/config.json")
    said = refused(*command, "--run", run)
    assert "is of another plan than the one that was chosen since" in said
    assert said.endswith(f"Run: depthfold merge --run {run}")
    assert not (run / "new.pt2").exists()
    done("merge", "--run", run)
    assert cuts(run / "plan.json") == cuts(run / "result/config.json")
    done(*command, "--run", run)


@pytest.mark.parametrize(
    "command", [("export", "--export", "new.pt2"), ("profile",), ("report",), ("report", *ELSEWHERE)]
)
def test_a_result_of_another_student_is_refused(command, run):
    done("finetune", "--run", run, "--no-distil")
    said = refused(*command, "--run", run)
    assert "was not merged from the student that was fine-tuned last" in said
    assert said.endswith(f"Run: depthfold merge --run {run}")
    done("merge", "--run", run)
    done(*command, "--run", run)
    if command[0] == "report":
        assert Findings.loads((run / "findings.json").read_text()).verification.ok


def test_a_report_uses_the_student_that_was_merged(run, tmp_path):
    """A new recipe in the settings has no student yet: the result is compared with its own student."""
    (tmp_path / "recipe.toml").write_text("steps = 3\nbatch = 8\n")
    (tmp_path / "own.toml").write_text('recipe = "recipe.toml"\ntarget = "cost_model:launch_us=1.0"\n')
    done("report", "--run", run, "--config", tmp_path / "own.toml", *ELSEWHERE)
    assert Findings.loads((run / "findings.json").read_text()).verification.ok


def test_an_unfinished_result_is_merged_again(run, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("depthfold.pipeline.artefacts"), "save", killed)
    assert depthfold("merge", "--run", run).exit_code == 130
    monkeypatch.undo()
    assert f"Run: depthfold merge --run {run}" in refused("export", "--run", run)
    done("merge", "--run", run)
    done("export", "--run", run)


@pytest.fixture
def orphan(run, workshop, tmp_path):
    """Return a finished run whose data are gone."""
    config = run / "config.toml"
    gone = config.read_text().replace(
        f'data = "{workshop / "net.py"}:data"', f'data = "imagefolder:{tmp_path / "gone"}"'
    )
    assert "gone" in gone
    config.write_text(f'input = "1x8x8"\n{gone}')
    return run


def test_most_commands_work_without_the_data(orphan):
    for command in ("report", "inspect", "latency", "solve", "merge", "export", "profile"):
        done(command, "--run", orphan)


@pytest.mark.parametrize("command", [("finetune",), ("importance",), ("compress",), ("report", *ELSEWHERE)])
def test_commands_that_need_the_data_say_that_they_are_missing(command, orphan, tmp_path):
    said = refused(*command, "--run", orphan)
    assert f"is missing: there is no folder {tmp_path / 'gone'}" in said


def test_the_size_of_missing_images_can_be_given(orphan):
    config = orphan / "config.toml"
    config.write_text(config.read_text().replace('input = "1x8x8"\n', ""))
    assert "If only the size of the images is needed, give --input 3x224x224." in refused("export", "--run", orphan)
    done("export", "--run", orphan, "--input", "1x8x8")


def test_a_surrogate_of_other_tables_is_refused(run, tmp_path, monkeypatch):
    fitted = Surrogate(intercept=0.0, slope=1.0, per_block=0.5, tau=1.0, plans=())
    monkeypatch.setattr(artefacts, "fit_surrogate", lambda *_, **__: fitted)
    fit = f"depthfold surrogate --run {run}"
    assert refused("solve", "--run", run, "--surrogate").endswith(f"has no surrogate.json yet. Run: {fit}")
    done("surrogate", "--run", run)
    done("solve", "--run", run, "--surrogate")

    table = ImportanceTable.loads((run / "importance.json").read_text())
    lower = replace(table, entries=tuple(replace(e, samples=tuple(x - 1 for x in e.samples)) for e in table.entries))
    other = tmp_path / "other.json"
    other.write_text(lower.dumps())
    text = f"The surrogate in {run} was fitted to another importance table than the present one. Run: "
    put = f"depthfold importance --run {run} --importance {other}"
    assert refused("solve", "--run", run, "--surrogate", "--importance", other).endswith(f"{text}{put} && {fit}")
    done(*put.split()[1:])
    assert refused("solve", "--run", run, "--surrogate").endswith(text + fit)
    done("surrogate", "--run", run)
    done("solve", "--run", run, "--surrogate")

    latency = run / "latency.json"
    slower = json.loads(latency.read_text())
    slower["entries"][0]["times"] = [2 * time for time in slower["entries"][0]["times"]]
    latency.write_text(json.dumps(slower))
    assert "was fitted to another latency table" in refused("solve", "--run", run, "--surrogate")
