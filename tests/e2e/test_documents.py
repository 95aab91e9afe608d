"""The code in the documents runs as it stands there, from top to bottom of each page."""

import re
import runpy
from pathlib import Path

import pytest

from cli_workshop import without_memory
from lacking import needs
from structures import mobilenet_v2
from tables import plausible_tables

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


@pytest.fixture
def tables_on_disk(tmp_path, monkeypatch):
    """The two tables that the pages read, in the columns of the published ones."""
    network = mobilenet_v2()
    latency, importance = plausible_tables(network.spans("paper"), network.flagged_spans("paper"), seed=0)
    latency.write_csv(tmp_path / "time.csv")
    importance.write_csv(tmp_path / "imp.csv")
    monkeypatch.chdir(tmp_path)


NEEDS = {
    "baselines.md": needs("torch_pruning"),
    "export.md": needs("openvino"),
    "notebooks.md": needs("plotly"),
}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=NEEDS.get(page.name, ()))
        for page in PAGES
        if BLOCK.search(page.read_text())
    ],
)
def test_the_python_of_a_page_runs(page, capsys, tables_on_disk):
    namespace = {}
    for block in BLOCK.findall(page.read_text()):
        for shown, tried in INSTEAD.get(page.name, {}).items():
            assert shown in page.read_text()
            block = block.replace(shown, tried)
        with without_memory():
            exec(compile(block, str(page), "exec"), namespace)
    printed = capsys.readouterr().out
    for line in EXPECTED[page.name]:
        assert line in printed


def test_picture_is_the_one_that_its_script_draws():
    script = ROOT / "docs" / "pictures" / "dropping.py"
    assert runpy.run_path(str(script))["picture"]() == script.with_suffix(".svg").read_text(encoding="utf-8")


# Everything as on the page but for the stopwatch, which no test can rely on, and what takes long: training, a second
# worker, and the number of blocks. Only the last inverted residual and the head may be merged, which saves less time.
INSTEAD = {
    "README.md": {
        ', "onnxruntime")': ', "cost_model")',
        "steps=60, batch=64, lr=0.02": "steps=2, batch=16, lr=0.001",
        "steps=1, batch=64": "steps=1, batch=8",
        "task.example())": "task.example(), ignore=[str(n) for n in range(1, 10)])",
        '"65%"': '"96%"',
    },
    "training.md": {"Processes(workers=2)": "Processes(workers=1)", "steps=10, batch=32": "steps=2, batch=8"},
}

EXPECTED = {
    "own-model.md": (),  # its file prints nothing; tests/cli/test_documented.py runs its command
    "backends.md": (
        "openvino",
        "threads 2",
        "InvalidValue: There is no backend 'onnx-runtime'",
        "half as fast: conforms",
    ),
    "export.md": (
        "the same bits: True",
        "ONNX, for batches of any size; onnxruntime",
        "PyTorch program, for batches of any size; pytorch",
        "OpenVINO IR, for batches of any size; openvino",
        "ResultError: out was made from Sequential (fingerprint",
        "by ONNX Runtime alone: (5, 4)",
        "ONNX, for batches of any size of raw images (NHWC); onnxruntime",
        "images (2, 4)\nuint8 NHWC, normalised in this file",
    ),
    "int8.md": ("ONNX in INT8, for batches of any size; onnxruntime", "points lower than float32"),
    "own-training.md": (
        "50 images held out",
        "merged within the tolerance: True",
        "logged steps: [1, 2, 3, 4, 5, 6, 7, 8]",
        "10 entries in the log",
    ),
    "notebooks.md": (" plans in the figure",),
    "report.md": ("out/report.html",),
    "baselines.md": (
        "DS-A-1.0, DS-B-1.0",
        "Plan: activations at 2 5",
        "plans, exact",
        "ms, pruned",
        "48 -> 36",
    ),
    "README.md": ("ONNX, for batches of any size; onnxruntime",),
    "plans.md": ("50 layers, 33 activations, 10 skips", "tolerance 1e-04", "of the original's", "saves ms"),
    "latency.md": ("in all; environment: machine", "calibrated on", "times as fast", "multiply-adds"),
    "tracing.md": ("Sequential: 3 layers", "Padding that depends on the size of the map, fixed at the traced size:"),
    "training.md": (
        "Importance table of Sequential: 6 flagged spans",
        "True",
        "; fit; Recipe(",
        "of 6 blocks measured",
    ),
    "solver.md": ("plans, exact", "if merging followed A, not S"),
    "dropping.md": (
        "drops layer 2 and the branch (3, 5]",
        "tolerance 1e-04",
        "3x3, 8 -> 8 without layers 3, 4, 5\n1x1, 8 -> 8, depth-wise without the branches (1, 3], (3, 5]",
        "10 spans, 14 more shapes with dropped layers",
        "24 entries, 14 with dropped layers, ",
        "ms by A  dropped layers",
    ),
}
