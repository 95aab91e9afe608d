"""Tables that were measured earlier or elsewhere are used instead of measuring: --latency FILE, --importance FILE."""

import html
import json

import pytest

from cli_workshop import depthfold, refused
from depthfold.core import ImportanceTable, LatencyTable
from depthfold.reporting import Findings


@pytest.fixture
def asked(workshop, compressed, tmp_path):
    def command(name, *options):
        return (name, "--config", workshop / "tiny.toml", "--run", tmp_path / "run", *options)

    return command


@pytest.fixture
def change(workshop, compressed, tmp_path):
    """Return a function that writes the finished run's latency table with changed fields and returns its path."""

    def write(**fields):
        table = json.loads((workshop / "whole/latency.json").read_text())
        environment = fields.pop("environment", {})
        table |= fields
        table["environment"] |= environment
        path = tmp_path / "changed.json"
        path.write_text(json.dumps(table))
        return path

    return write


def test_both_tables_are_used_and_recorded(asked, workshop, tmp_path, monkeypatch):
    def measured(*_, **__):
        raise AssertionError("nothing is measured for a table")

    monkeypatch.setattr("depthfold.pipeline.artefacts.measure_latency", measured)
    monkeypatch.setattr("depthfold.pipeline.artefacts.measure_importance", measured)
    tables = [workshop / "whole" / f"{name}.json" for name in ("latency", "importance")]
    done = depthfold(*asked("compress", "--latency", tables[0], "--importance", tables[1]))
    assert done.exit_code == 0, done.output
    for path, kind in zip(tables, (LatencyTable, ImportanceTable), strict=True):
        assert kind.loads((tmp_path / "run" / path.name).read_text()) == kind.loads(path.read_text())
        record = json.loads((tmp_path / "run/run.json").read_text())["made_from"][path.name]
        assert [*record] == ["given table"]
    assert str(tables[0]) in (tmp_path / "run/config.toml").read_text()
    plan = (tmp_path / "run/plan.json").read_text()
    assert plan == (workshop / "whole/plan.json").read_text()


def test_a_doubtful_table_trains_nothing_with_given_importances(asked, change, workshop, tmp_path):
    given = (
        "--latency",
        change(doubt="a block took twice as long"),
        "--importance",
        workshop / "whole/importance.json",
    )
    said = refused(*asked("compress", *given))
    assert "so nothing was trained: a block took twice as long. When nothing else runs, measure another one" in said
    assert not (tmp_path / "run/students").exists()
    assert depthfold(*asked("compress", "--allow-doubtful", *given)).exit_code == 0


def test_a_table_of_another_machine_leads_to_a_plan(asked, change, tmp_path):
    table = change(environment={"machine": "a phone", "threads": 8})
    done = depthfold(*asked("latency", "--latency", table))
    assert done.exit_code == 0, done.output
    warned = " ".join(done.stderr.split())
    assert (
        "The latency table was measured elsewhere (machine: a phone against cost model; threads: 8 against 1)" in warned
    )
    assert depthfold("importance", "--run", tmp_path / "run").exit_code == 0
    done = depthfold("solve", "--run", tmp_path / "run")  # the plan is timed here
    assert done.exit_code == 0 and "Chosen for the budget of 80%" in done.stdout, done.output


def test_report_of_a_plan_that_was_chosen_here_with_a_table_of_another_machine(asked, change, workshop, tmp_path):
    tables = "--latency", change(environment={"machine": "a phone"}), "--importance", workshop / "whole/importance.json"
    done = depthfold(*asked("compress", *tables))
    assert done.exit_code == 0, done.output
    findings = Findings.loads((tmp_path / "run/findings.json").read_text())
    assert findings.title == "Sequential at 80% on cost_model" and findings.notes == ()
    page = html.unescape((tmp_path / "run/report.html").read_text())
    assert (
        "The latency table was measured in a different environment" in page and "met its budget in another" not in page
    )


def test_a_warning_is_printed_once_per_command(asked, change):
    """The checks of the command and those of compress() give the same warning."""
    command = asked("compress", "--latency", change(environment={"machine": "a phone"}), "--budget", "20x")
    for _ in range(2):
        assert refused(*command).count("The latency table was measured elsewhere") == 1


def test_wrong_tables_are_refused_and_leave_nothing(asked, change, tmp_path):
    (tmp_path / "broken.json").write_text("{}")
    for table, said in (
        (change(fingerprint="0" * 16), "The latency table is not of the network 'Sequential'"),
        (tmp_path / "broken.json", "broken.json cannot be read"),
        (tmp_path / "none.json", "Check the path given with --latency"),
    ):
        assert said in refused(*asked("compress", "--latency", table))
    said = refused(*asked("compress", "--latency", change(environment={"runtime": "tensorrt", "batch": 8})))
    assert "in another environment than the target's (runtime: tensorrt against cost_model; batch: 8 against 1)" in said
    assert not (tmp_path / "run").exists()


def test_a_csv_file_is_a_latency_table(asked, workshop, tmp_path):
    LatencyTable.loads((workshop / "whole/latency.json").read_text()).write_csv(tmp_path / "time.csv")
    done = depthfold(*asked("inspect", "--latency", tmp_path / "time.csv"))
    assert done.exit_code == 0 and "The fastest plan takes" in done.stdout, done.output


@pytest.mark.parametrize("option", [("--method", "recalibrated"), ("--importance-recipe", "quick"), ("--no-reinit",)])
def test_options_for_measuring_replace_a_table_that_was_given_before(run, workshop, option, monkeypatch):
    table = workshop / "whole/importance.json"
    assert depthfold("importance", "--run", run, "--importance", table).exit_code == 0
    measured = []
    monkeypatch.setattr("depthfold.pipeline.artefacts.measure_importance", lambda *_, **__: measured.append(1) or 1 / 0)
    assert depthfold("importance", "--run", run).exit_code == 0 and not measured
    assert depthfold("importance", "--run", run, *option, "--importance", table).exit_code == 0 and not measured
    depthfold("importance", "--run", run, *option)
    assert measured


def test_the_run_forgets_a_table_that_was_replaced_by_a_method(run, workshop):
    assert depthfold("importance", "--run", run, "--importance", workshop / "whole/importance.json").exit_code == 0
    (run / "importance.jsonl").unlink()  # of another method
    done = depthfold("importance", "--run", run, "--method", "recalibrated")
    assert done.exit_code == 0, done.output
    assert "importance.json" not in (run / "config.toml").read_text()
    assert [*json.loads((run / "run.json").read_text())["made_from"]["importance.json"]] != ["given table"]


def test_a_resumed_run_uses_its_copies_of_tables_that_are_gone(asked, workshop, tmp_path, monkeypatch):
    for name in ("latency", "importance"):
        kind = LatencyTable if name == "latency" else ImportanceTable
        kind.loads((workshop / f"whole/{name}.json").read_text()).write_csv(tmp_path / f"{name}.csv")
    given = ("--latency", tmp_path / "latency.csv", "--importance", tmp_path / "importance.csv")
    assert depthfold(*asked("compress", *given)).exit_code == 0
    (tmp_path / "latency.csv").unlink()
    (tmp_path / "importance.csv").unlink()
    copies = [(tmp_path / "run" / f"{name}.json").read_text() for name in ("latency", "importance")]
    done = depthfold("compress", "--run", tmp_path / "run")
    assert done.exit_code == 0, done.output
    warned = " ".join(done.stderr.split())
    for name in ("latency", "importance"):
        copy = tmp_path / f"run/{name}.json"
        assert (
            f"The {name} table {tmp_path / name}.csv is gone, so its copy in the run folder is used: {copy}." in warned
        )
    assert copies == [(tmp_path / "run" / f"{name}.json").read_text() for name in ("latency", "importance")]
    assert "is gone" not in depthfold("solve", "--run", tmp_path / "run").stderr
    said = refused(*asked("compress", *given))
    assert "There is no latency table" in said and "There is no importance table" in said
