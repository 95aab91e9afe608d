"""Where exports may go: into the run folder, beside what the run keeps there."""

import pytest

from depthfold.errors import InvalidValue
from depthfold.pipeline.preflight import expect_exports


@pytest.mark.parametrize("name", ["model.onnx", "./model.onnx", "exports/small.pt2", "a..b.onnx", "results/model.xml"])
def test_names_inside_the_run_are_taken(name):
    expect_exports([name])


@pytest.mark.parametrize("name", ["../model.onnx", "/tmp/model.onnx", "a/../../model.onnx", "~/model.onnx"])
def test_names_outside_the_run_are_refused(name):
    with pytest.raises(
        InvalidValue, match=r"is outside the run folder\. Names of exports are relative to it: write model\.onnx\."
    ):
        expect_exports([name])


@pytest.mark.parametrize(
    "name", ["result/model.onnx", "./result/model.onnx", "RESULT/model.onnx", "latency.json/m.xml"]
)
def test_names_that_fall_on_the_run_s_own_are_refused(name):
    with pytest.raises(InvalidValue, match=r"is reserved: .* belongs to the run\. Write m.*exports/m"):
        expect_exports([name])


def test_everything_that_a_run_leaves_is_its_own(run):
    kept = {path.name for path in run.iterdir()} - {"model.pt2"}  # what was exported
    assert {"config.toml", "result", "students", "latency.jsonl", "importance.jsonl", "report.html"} <= kept
    for name in kept:
        with pytest.raises(InvalidValue, match="belongs to the run"):
            expect_exports([f"{name}/model.onnx"])
