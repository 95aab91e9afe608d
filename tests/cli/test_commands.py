"""The commands as a user runs them: their output, the files in the run folder, and resuming."""

import dataclasses
import importlib
import json
import re
import subprocess
import sys
import tomllib

import pytest

from cli_workshop import depthfold, refused
from depthfold.core import BlockOption, ImportanceTable, LatencyTable, MeasuredSpeedup, Network, SolvedPlan
from depthfold.reporting import Findings
from depthfold.stage_one import useless_options

COMMANDS = ["inspect", "latency", "importance", "solve", "finetune", "merge", "export", "report", "compress", "profile"]
WEIGHTS = "result/model.safetensors"


def test_every_command_has_help_with_an_example():
    listed = depthfold("--help").stdout
    for command in COMMANDS:
        assert f" {command} " in listed
        text = depthfold(command, "--help").stdout
        assert f"Example: depthfold {command}" in " ".join(text.split())


@pytest.mark.parametrize("command", [(), *((name,) for name in (*COMMANDS, "surrogate", "demo"))])
def test_help_shows_no_type_beside_flags(command):
    text = " ".join(depthfold(*command, "--help").stdout.replace("│", " ").split())
    assert "--help -h Show this message" in text and "--debug Show the traceback" in text
    assert "bool" not in text.lower()
    if command == ("compress",):
        assert "--retry Retry what failed" in text and "--int8 --no-int8 Also write" in text
        assert "--budget BUDGET The latency to reach" in text, "what takes a value still says which"


def test_help_does_not_import_torch():
    script = """
import sys
from depthfold.cli import main
sys.argv = ["depthfold", "compress", "--help"]
try:
    main()
finally:
    print("LOADED", [name for name in ("torch", "numpy", "torchvision") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "depthfold compress" in done.stdout and "LOADED []" in done.stdout


def test_compress_prints_both_networks_and_the_paths_of_the_results(workshop, compressed):
    findings = Findings.loads((workshop / "whole/findings.json").read_text())
    shown = " ".join(compressed.stdout.split())
    assert f"{findings.before.latency:.4g} ms {findings.after.latency:.4g} ms" in shown
    assert f"{findings.before.latency / findings.after.latency:.2f}x as fast" in shown
    assert f"{findings.score_after.score:.2%} ±" in shown
    for name in ("report.html", "result", "model.pt2"):
        assert (workshop / "whole" / name).exists() and str(workshop / "whole" / name) in compressed.stdout
    assert "\x1b" not in compressed.output  # plain text, because it is not a terminal


def test_commands_that_score_report_progress(run):
    (run / "profiles.json").unlink()
    for command in (("compress",), ("report", "--target", "cost_model")):
        done = depthfold(*command, "--run", run)
        assert done.exit_code == 0, done.output
        assert "scored batches: 0 of 2" in done.stderr and "scored batches: 2 of 2, done" in done.stderr
        assert "latency and memory: 3 of 3, done" in done.stderr
    assert "latency and memory: 3 of 3, done" in depthfold("profile", "--run", run).stderr


def test_compress_traces_the_model_once(run, monkeypatch):
    module = importlib.import_module("depthfold.tracing.trace")  # the attribute of that name is the function
    record, traced = module.record_and_check, []
    monkeypatch.setattr(module, "record_and_check", lambda *args: traced.append(args) or record(*args))
    assert depthfold("compress", "--run", run).exit_code == 0
    assert len(traced) == 1


def test_single_stages_give_the_same_result_as_compress(workshop, compressed, tmp_path):
    run, whole = tmp_path / "staged", workshop / "whole"
    first = depthfold("latency", "--config", workshop / "tiny.toml", "--run", run)
    assert first.exit_code == 0 and "Latency table of Sequential: 6 spans, 3 layers" in first.stdout
    for command, text in (
        ("importance", "Importance table of Sequential"),
        ("solve", "Chosen for the budget of 80%:\nmeasured end to end: "),
        ("finetune", "Fine-tuned. The metrics are in"),
        ("merge", "tolerance"),
        ("export", "model.pt2: PyTorch program, for batches of any size"),
        ("report", "report.html"),
    ):
        result = depthfold(command, "--run", run)  # config.toml has the other settings
        assert result.exit_code == 0, result.output
        assert text in result.stdout
        if command == "finetune":
            (curve_of_run,) = run.glob("students/*/finetuning/metrics.jsonl")
            assert result.stdout.strip() == f"Fine-tuned. The metrics are in {curve_of_run.parent}."
    plans = [SolvedPlan.loads((folder / "plan.json").read_text()) for folder in (run, whole)]
    assert plans[0] == plans[1]
    assert (run / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()
    findings = [Findings.loads((folder / "findings.json").read_text()) for folder in (run, whole)]
    (metrics,) = whole.glob("students/*/finetuning/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    curve = [(line["step"], line["loss"], line["score"]) for line in lines]
    for found in findings:
        assert [(point.step, point.loss, point.score) for point in found.training] == curve != []
        assert found.frontier.importance_meaning == "Importance: predicted change of accuracy, in points"


def test_solve_prints_what_was_measured_and_what_was_predicted(run):
    plan = SolvedPlan.loads((run / "plan.json").read_text())
    slower = dataclasses.replace(plan, measured=MeasuredSpeedup(original=(2.0, 3.0, 4.0), network=(1.0, 1.0, 1.0)))
    (run / "plan.json").write_text(slower.dumps())
    shown = depthfold("solve", "--run", run)
    assert shown.exit_code == 0, shown.output
    _, _, chosen = shown.stdout.partition("Chosen for the budget of 80%:\n")
    lines = chosen.splitlines()
    assert lines[0] == "measured end to end: 1 ms, 33.3% of the original's 3 ms (3.00x as fast, unreliable)"
    assert lines[1] == "unreliable: the original took 2 to 4 ms; something else was probably running"
    assert lines[2].startswith(f"predicted: {plan.latency:.4g} ms, ")
    assert lines[-1] == f"When the machine is quiet, delete {run / 'plan.json'} and run this command again."


def test_method_of_importance_is_kept_and_leaves_out_blocks_that_save_no_time(workshop, tmp_path):
    run = tmp_path / "run"
    told = ("--config", workshop / "tiny.toml", "--run", run)
    assert depthfold("latency", *told, "--method", "fit").exit_code == 2  # an option of other commands
    assert depthfold("latency", *told).exit_code == 0
    done = depthfold("importance", *told, "--method", "local")
    assert done.exit_code == 0, done.output
    table = ImportanceTable.loads((run / "importance.json").read_text())
    assert "; local; Recipe(" in table.provenance and "steps=3" in table.provenance
    latency = LatencyTable.loads((run / "latency.json").read_text())
    network = Network.loads((run / "network.json").read_text())
    left_out = [entry.span for entry in table.entries if entry.reason]
    useless = useless_options(network, latency, map(BlockOption, network.flagged_spans()))
    assert set(left_out) == {option.block for option in useless}
    assert tomllib.loads((run / "config.toml").read_text())["method"] == "local"
    assert depthfold("importance", "--run", run).exit_code == 0
    found = refused("importance", "--run", run, "--method", "brief")
    assert "(method: local there, brief here; compares outputs: True there, False here)" in found
    assert "The method 'local' reinitialises no layer" in refused("importance", "--run", run, "--reinit")
    assert "There is no method 'loca'. Did you mean 'local'?" in refused("importance", "--run", run, "--method", "loca")


@pytest.mark.parametrize("command", COMMANDS[1:])
def test_commands_can_be_repeated_on_a_finished_run(command, run):
    before = (run / WEIGHTS).read_bytes()
    result = depthfold(command, "--run", run)
    assert result.exit_code == 0, result.output
    assert (run / WEIGHTS).read_bytes() == before


@pytest.mark.parametrize(
    ("command", "wants"),
    [
        ("solve", "no latency.json yet. Run: depthfold latency --run"),
        ("finetune", "no plan.json yet. Run: depthfold solve --run"),
        ("merge", "no plan.json yet. Run: depthfold solve --run"),
        ("export", "no result yet. Run: depthfold merge --run"),
        ("report", "no plan.json yet. Run: depthfold solve --run"),
    ],
)
def test_a_command_without_its_inputs_names_the_command_that_makes_them(command, wants, workshop, tmp_path):
    (tmp_path / "new").mkdir()
    assert wants in refused(command, "--config", workshop / "tiny.toml", "--run", tmp_path / "new")


def test_merge_needs_a_finished_fine_tuning_of_the_same_plan(run):
    (last,) = run.glob("students/*/finetuning/last.safetensors")
    kept = last.read_bytes()
    last.unlink()
    wanted = f"Run: depthfold finetune --run {run}"
    assert wanted in refused("merge", "--run", run)
    last.write_bytes(kept)
    plan = SolvedPlan.loads((run / "plan.json").read_text())
    frontier = depthfold("solve", "--run", run, "--budget", "100%")
    assert frontier.exit_code == 0
    assert SolvedPlan.loads((run / "plan.json").read_text()).plan.cuts != plan.plan.cuts
    assert wanted in refused("merge", "--run", run)  # the new plan has its own folder, without a training


def test_inspect_prints_the_network_or_its_json(workshop):
    asked = ("inspect", f"{workshop / 'net.py'}:model", "--input", "1x8x8")
    assert "Sequential: 3 layers, 3 activations" in depthfold(*asked).stdout
    network = Network.loads(depthfold(*asked, "--json").stdout)
    assert [layer.where for layer in network.layers] == ["0", "3", "6"]


def test_inspect_takes_models_of_torchvision_and_timm():
    for model in ("torchvision:resnet18,num_classes=7", "timm:resnet18"):
        shown = depthfold("inspect", model, "--input", "3x64x64")
        assert shown.exit_code == 0, shown.output
        assert "layer1.0.conv1" in shown.stdout


def test_profile_of_a_model_and_of_a_run(workshop, run):
    alone = depthfold("profile", f"{workshop / 'net.py'}:model", "--input", "1x8x8", "--target", "cost_model")
    assert alone.exit_code == 0 and "after" not in alone.stdout
    assert re.search(r"^parameters +363$", alone.stdout, re.MULTILINE)
    both = depthfold("profile", "--run", run)
    assert both.exit_code == 0 and "before" in both.stdout and "after" in both.stdout


def test_a_given_importance_table_replaces_the_trainings(workshop, compressed, tmp_path):
    table = workshop / "whole/importance.json"
    done = depthfold("importance", "--config", workshop / "tiny.toml", "--run", tmp_path, "--importance", table)
    assert done.exit_code == 0 and not (tmp_path / "importance.jsonl").exists()
    assert (tmp_path / "importance.json").read_text() == table.read_text()


def test_options_override_the_file_and_the_file_overrides_the_run(workshop, compressed, run, tmp_path):
    def kept():
        return tomllib.loads((run / "config.toml").read_text())

    assert (kept()["budget"], kept()["space"], kept()["batch"]) == ("80%", "paper", 1)  # the file, and defaults
    config = tmp_path / "own.toml"
    config.write_text('budget = "99%"\nalpha = 1.5\n')
    assert depthfold("solve", "--run", run, "--config", config).exit_code == 0
    assert (kept()["budget"], kept()["alpha"]) == ("99%", 1.5)
    assert depthfold("solve", "--run", run, "--config", config, "--budget", "95%", "--alpha", "1.6").exit_code == 0
    assert (kept()["budget"], kept()["alpha"]) == ("95%", 1.6)


@pytest.mark.parametrize("command", ["solve", "compress"])
def test_settings_of_a_failed_command_are_not_kept(command, run):
    refused(command, "--run", run, "--budget", "1%")
    assert tomllib.loads((run / "config.toml").read_text())["budget"] == "80%"


def test_interruption_prints_one_line_and_exits_with_130(run, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("depthfold.settings.stages.frontier_stage", interrupted)
    said = refused("solve", "--run", run, code=130)
    assert said == "Interrupted: run the same command again to resume."


def test_unexpected_errors_exit_with_1_and_debug_shows_the_traceback(run, monkeypatch):
    def fails(*_, **__):
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("depthfold.settings.stages.frontier_stage", fails)
    assert "ZeroDivisionError: by zero (run with --debug" in refused("solve", "--run", run, code=1)
    for debugged in (("--debug", "solve", "--run", run), ("solve", "--run", run, "--debug")):
        result = depthfold(*debugged)
        assert result.exit_code == 1 and "in fails" in result.stderr


def test_wrong_options_are_explained_by_typer():
    result = depthfold("solve", "--bugdet", "60%")
    assert result.exit_code == 2 and "No such option" in result.stderr
