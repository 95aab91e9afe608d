"""The notebook and the scripts in examples/ run."""

import ast
import re
import runpy
import sys
from pathlib import Path

import pytest

from cli_workshop import without_memory
from depthfold.jobs import InProcess
from lacking import library, needs

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))

# Tests do not depend on measured latencies, and need fewer blocks and steps of training than a reader.
INSTEAD = {
    'TARGET = "onnxruntime"': 'TARGET = "cost_model"',
    "int(name) < 9": "int(name) < 10",
    "steps=2, batch=32": "steps=1, batch=8",
    "steps=8, batch=32, lr=0.002": "steps=2, batch=8, lr=0.001",
}


def run(script, *arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with without_memory():
        return runpy.run_path(str(EXAMPLES / script), run_name="__main__")


@needs("nbclient", "plotly")
def test_notebook_runs_and_shows_its_tables_and_the_plot(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
    nbformat, nbclient = library("nbformat"), library("nbclient")
    notebook = nbformat.read(EXAMPLES / "first_steps.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # what it prints depends on the machine
    for shown, tried in INSTEAD.items():
        assert any(shown in cell.source for cell in notebook.cells)
        for cell in notebook.cells:
            cell.source = cell.source.replace(shown, tried)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    html = [output.data.get("text/html", "") for output in outputs if output.output_type == "execute_result"]
    titles = ("SmallMobileNet: ", "Latency table of ", "Importance table of ", "Frontier of ")
    assert all(any(f"<p>{title}" in shown for shown in html) for title in titles)
    assert any("application/vnd.plotly.v1+json" in output.get("data", {}) for output in outputs)
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "tolerance 1e-04" in printed and "accuracy on the hold-out set: " in printed


@pytest.mark.slow
def test_own_model_and_data_are_compressed(tmp_path, monkeypatch, capsys):
    run("own_model.py", "--run", str(tmp_path), "--target", "cost_model", monkeypatch=monkeypatch)
    printed = capsys.readouterr().out
    before, after = map(float, re.search(r"score ([\d.]+) -> ([\d.]+),", printed).groups())
    assert before > 50 and after > before - 10
    assert (tmp_path / "report.html").exists()


@pytest.mark.slow
def test_timm_model_is_compressed_on_an_image_folder(tmp_path, monkeypatch, capsys):
    run("timm_image_folder.py", "--run", str(tmp_path), "--target", "cost_model", monkeypatch=monkeypatch)
    assert re.search(r"Compressed\(latency .* 13 traced convolutions -> \d+,", capsys.readouterr().out)
    assert (tmp_path / "report.html").exists()


@pytest.mark.slow
def test_table_is_measured_by_the_workers_of_a_cluster(tmp_path, monkeypatch, capsys):
    """With workers in this process: tests/importance and tests/jobs have a real cluster."""
    options = {}
    monkeypatch.setattr("depthfold.jobs.RayCluster", lambda **given: options.update(given) or InProcess())
    small = ("--workers", "1", "--gpus", "0.25", "--blocks", "9", "10")
    run("ray_cluster.py", *small, "--run", str(tmp_path), monkeypatch=monkeypatch)
    assert options == dict(address="local", cpus=1.0, gpus=0.25, workers=1)
    printed = capsys.readouterr().out
    assert "Importance table of SmallMobileNet: 13 flagged spans, 7 without a score, 6 layers" in printed
    assert re.search(r"Frontier of SmallMobileNet: \d+ plans, exact", printed)


def test_backbone_of_a_detector_is_compressed(monkeypatch, capsys):
    run("detector_backbone.py", "--target", "cost_model", monkeypatch=monkeypatch)
    printed = capsys.readouterr().out
    before, after = map(float, re.search(r"IoU before ([\d.]+) %, after ([\d.]+) %", printed).groups())
    assert before > 50 and after > before - 10
    assert "tolerance 1e-04" in printed


@pytest.mark.parametrize("script", SCRIPTS)
def test_docstring_of_a_script_has_its_command(script):
    docstring = ast.get_docstring(ast.parse((EXAMPLES / script).read_text()))
    assert f"    python examples/{script}" in docstring
    assert script in (EXAMPLES / "README.md").read_text()
