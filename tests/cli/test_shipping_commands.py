"""depthfold export and compress: INT8, raw images, and model cards."""

import re
import textwrap

import numpy
import onnx
import onnxruntime

import depthfold as df
from cli_workshop import depthfold, refused
from depthfold.exporting import int8

PIXELS = textwrap.dedent(
    """
    import torch
    import depthfold as df


    def data():
        random = torch.Generator().manual_seed(0)
        images, labels = torch.randint(200, (96, 1, 8, 8), generator=random), torch.arange(96) % 3
        images[torch.arange(96), 0, 2 * labels] += 55
        images = images.to(torch.uint8)
        return df.ClassificationTask.tensors(
            train=(images[:64], labels[:64]), test=(images[64:], labels[64:]), holdout=0.25
        )
    """
)


def test_export_writes_int8_files_and_cards(run):
    done = depthfold("export", "--run", run, "--export", "model.onnx", "--export", "model.pt2", "--int8")
    assert done.exit_code == 0, done.output
    assert "model-int8.onnx: ONNX in INT8, for batches of any size; onnxruntime" in done.stdout
    kinds = {node.op_type for node in onnx.load(run / "model-int8.onnx").graph.node}
    assert "QuantizeLinear" in kinds
    assert not (run / "model-int8.pt2").exists()
    text = (run / "model-int8.onnx.md").read_text()
    assert "Beside the same network in float32: score " in text
    assert "| latency | " in text  # the run has findings
    assert "- Mean: 0\n" in text
    for name in ("model.onnx.md", "model.pt2.md"):
        assert "## Before and after" in (run / name).read_text()
    (found,) = df.Findings.loads((run / "findings.json").read_text()).int8
    assert f"score {found.score:.4g} on the test set" in done.stdout
    assert found.name in (run / "report.html").read_text()
    depthfold("report", "--run", run, "--target", "cost_model")  # measures again
    assert df.Findings.loads((run / "findings.json").read_text()).int8 == (found,)


def test_compress_shows_int8_beside_the_rest(run):
    done = depthfold("compress", "--run", run, "--export", "model.onnx", "--int8")
    assert done.exit_code == 0, done.output
    (found,) = df.Findings.loads((run / "findings.json").read_text()).int8
    assert f"model-int8.onnx: score {found.score:.4g} on the test set (float32: " in done.stdout
    assert found.name in (run / "report.html").read_text()
    assert (run / "model-int8.onnx").exists() and (run / "model-int8.onnx.md").exists()


def test_int8_is_timed_on_the_target_of_the_run(run):
    config = run / "config.toml"
    text = config.read_text()
    config.write_text(text.replace('target = "cost_model"', 'target = "onnxruntime:threads=3"'))
    assert config.read_text() != text
    done = depthfold("export", "--run", run, "--export", "model.onnx", "--int8")
    assert done.exit_code == 0, done.output
    assert re.search(r"x as fast.*\) with 3 threads", done.stdout)  # a busy machine may add: unreliable
    section = (run / "model-int8.onnx.md").read_text().partition("## INT8")[2].partition("## Network")[0]
    assert "threads 3." in section


def test_export_refuses_int8_without_an_onnx_file_before_it_writes(run):
    before = sorted(run.iterdir())
    message = refused("export", "--run", run, "--export", "a.pt2", "--int8")
    assert "INT8 files are made from ONNX files, and the exports are a.pt2. Add model.onnx." in message
    assert sorted(run.iterdir()) == before


def test_cards_of_float32_files_survive_an_int8_file_that_loses_too_much(run, monkeypatch):
    monkeypatch.setattr(int8, "_scores", lambda *_: [0.0, 100.0])
    message = refused("export", "--run", run, "--export", "a.onnx", "--int8")
    assert "The INT8 file scores 0 on the test set, and float32 100" in message
    assert {path.name for path in run.glob("a*")} == {"a.onnx", "a.onnx.md"}


def test_export_takes_raw_images(run, tmp_path):
    (tmp_path / "pixels.py").write_text(PIXELS)
    data = ("--data", f"{tmp_path / 'pixels.py'}:data")
    done = depthfold("export", "--run", run, "--export", "raw.onnx", "--raw-images", "NHWC", *data)
    assert done.exit_code == 0, done.output
    session = onnxruntime.InferenceSession(run / "raw.onnx")
    given = numpy.random.default_rng(0).integers(0, 256, (2, 8, 8, 1), dtype=numpy.uint8)
    assert session.run(None, {session.get_inputs()[0].name: given})[0].shape == (2, 3)
    assert "uint8 images, NHWC: batch x 8 x 8 x 1." in (run / "raw.onnx.md").read_text()


def test_compress_writes_cards(workshop, compressed):
    text = (workshop / "whole/model.pt2.md").read_text()
    assert "| latency | " in text and "at 80% on cost_model" in text
    assert "- Classes, in the order of the outputs (3): 0, 1, 2\n" in text


def test_requests_that_cannot_be_met_are_refused_before_anything_runs(workshop, tmp_path):
    asked = ("compress", "--config", workshop / "tiny.toml", "--run", tmp_path / "new")
    assert "INT8 files are made from ONNX files, and the exports are model.pt2." in refused(*asked, "--int8")
    assert "The images of this task are floats" in refused(*asked, "--raw-images", "NHWC")
    assert "The layout of raw images is NHWC or NCHW, found 'HWC'." in refused(*asked, "--raw-images", "HWC")
    assert not (tmp_path / "new").exists()
