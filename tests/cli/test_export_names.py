"""Names of exports: inside the run folder, beside the files of the run."""

import pytest

from depthfold.errors import InvalidValue
from depthfold.pipeline.preflight import check_exports


@pytest.mark.parametrize("name", ["model.onnx", "./model.onnx", "exports/small.pt2", "a..b.onnx", "results/model.xml"])
def test_names_inside_the_run_folder_are_accepted(name):
    check_exports([name])


@pytest.mark.parametrize("name", ["../model.onnx", "/tmp/model.onnx", "a/../../model.onnx", "~/model.onnx"])
def test_names_outside_the_run_folder_are_refused(name):
    with pytest.raises(
        InvalidValue, match=r"is outside the run folder\. Names of exports are relative to it: write model\.onnx\."
    ):
        check_exports([name])


@pytest.mark.parametrize(
    "name", ["result/model.onnx", "./result/model.onnx", "RESULT/model.onnx", "latency.json/m.xml"]
)
def test_names_of_the_runs_own_files_are_refused(name):
    with pytest.raises(InvalidValue, match=r"is reserved: .* belongs to the run\. Write m.*exports/m"):
        check_exports([name])


@pytest.mark.parametrize("name", ["report.html", "result", "config.toml"])
def test_reserved_name_is_not_recommended(name):
    with pytest.raises(InvalidValue, match=r"cannot be exported: its suffix must be one of \.onnx, \.pt2"):
        check_exports([name])


def test_all_files_of_a_run_are_reserved(run):
    kept = {path.name for path in run.iterdir()} - {"model.pt2", "model.pt2.md"}  # the export and its card
    assert {"config.toml", "result", "students", "latency.jsonl", "importance.jsonl", "report.html"} <= kept
    for name in kept:
        with pytest.raises(InvalidValue, match="belongs to the run"):
            check_exports([f"{name}/model.onnx"])
