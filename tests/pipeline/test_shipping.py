"""The exported files of a run: INT8 forms, and model cards."""

import dataclasses

import pytest
import torch
from torch import nn

import depthfold as df
from depthfold.core import Environment
from depthfold.errors import InvalidValue
from depthfold.exporting import Exported, Images, Quantised
from depthfold.pipeline.preflight import check_raw_images, checked_options
from depthfold.pipeline.shipping import export_files, int8_names, model_card, with_int8, write_cards
from depthfold.reporting import Findings
from depthfold.tasks import Preprocessing
from lacking import needs
from merged import classifier, merged, picture
from runs import loaded_run, measured_run

PREPROCESSING = Preprocessing(
    channels=3, size=(32, 48), mean=(0.1, 0.2, 0.3), deviation=(0.4, 0.5, 0.6), classes=("cat", "dog"), crop_ratio=0.875
)

COMPARED = Quantised(
    split="test", score=90.0, float32_score=90.5, latency=0.5, float32_latency=1.0,
    environment=Environment(runtime="onnxruntime", threads=3),
)  # fmt: skip


@pytest.fixture(scope="module")
def shallow():
    return merged(classifier(), plan=df.Plan({1}, {1}))


def card(shallow, path, findings=None, **given):
    return model_card(shallow, Exported(path=path, format="ONNX", batch="dynamic", **given), findings)


def test_card_states_what_was_measured(shallow, tmp_path):
    findings = measured_run()
    text = card(shallow, tmp_path / "m.onnx", findings)
    assert "| latency | 20 ms | 12.5 ms | 1.60x as fast |" in text
    assert "| top-1 accuracy, test set | 72.00%" in text
    assert f"{findings.title}." in text  # with the budget and the target
    assert f"Measured in this environment: {findings.environment}." in text
    assert str(df.Plan({1}, {1})) in text


def test_card_says_if_the_speedup_is_unreliable(shallow, tmp_path):
    text = card(shallow, tmp_path / "m.onnx", loaded_run())
    assert "| latency | 20 ms | 12.5 ms | 1.60x as fast, unreliable |" in text
    assert "\n\nUnreliable: the original took 12 to 31 ms; something else was probably running.\n\n" in text


def test_card_states_the_preprocessing(shallow, tmp_path):
    plain = card(shallow, tmp_path / "m.onnx", images=Images(preprocessing=PREPROCESSING))
    raw = card(shallow, tmp_path / "m.onnx", images=Images(preprocessing=PREPROCESSING, layout="NHWC"))
    assert "float32 images, NCHW: batch x 3 x 32 x 48, normalised to (x / 255 - mean) / deviation." in plain
    assert "uint8 images, NHWC: batch x 32 x 48 x 3. The file normalises them itself." in raw
    for text in (plain, raw):
        assert "- Size: 32 x 48 (height, width), after a centre crop of 0.875 of the shorter side." in text
        assert "- Mean: 0.1, 0.2, 0.3\n- Deviation: 0.4, 0.5, 0.6\n" in text
        assert "- Classes, in the order of the outputs (2): cat, dog\n" in text


def test_card_of_many_classes_is_short(shallow, tmp_path):
    many = Preprocessing(
        channels=1, size=(8, 8), mean=(0.0,), deviation=(1.0,), classes=tuple(map(str, range(1000))), uint8=False
    )
    text = card(shallow, tmp_path / "m.onnx", images=Images(preprocessing=many))
    assert "(1000): 0, 1," in text
    assert ", 19, and 980 more\n" in text
    assert "normalised to (x - mean) / deviation, x as in the task's float images." in text


def test_card_compares_int8_with_float32(shallow, tmp_path):
    text = card(shallow, tmp_path / "m.onnx", int8=COMPARED)
    assert f"Beside the same network in float32: {COMPARED}." in text
    assert "Measured in this environment: runtime onnxruntime, threads 3." in text
    assert "INT8" not in card(shallow, tmp_path / "m.onnx")


def test_card_of_an_int8_file_says_what_is_about_float32(shallow, tmp_path):
    about_float32 = "This table describes the float32 file, not this INT8 file."
    text = card(shallow, tmp_path / "m.onnx", measured_run(), int8=COMPARED, error=1.2e-7, environment=Environment())
    assert about_float32 in text.partition("## Before and after")[2].partition("## INT8")[0]
    assert "The float32 file that this file was made from is within 1.2e-07 of PyTorch." in text
    assert "The file was compared with PyTorch" not in text
    assert about_float32 not in card(shallow, tmp_path / "m.onnx", measured_run())


@pytest.mark.parametrize("name", ["m.onnx", "m.pt2", pytest.param("m.xml", marks=needs("openvino"))])
def test_code_of_a_card_runs_the_file(shallow, tmp_path, monkeypatch, name):
    exported = df.export(shallow, tmp_path / name)
    (written,) = write_cards(shallow, [exported], None)
    assert written == tmp_path / f"{name}.md"
    text = written.read_text(encoding="utf-8")
    assert "The file was compared with PyTorch: " in text
    images = torch.randn(3, 3, 9, 8)
    names = {"images": images if name == "m.pt2" else images.numpy()}
    monkeypatch.chdir(tmp_path)
    exec(text.partition("```python\n")[2].partition("```")[0], names)
    found = torch.as_tensor(names["outputs"] if name == "m.pt2" else names["outputs"][0])
    torch.testing.assert_close(found, shallow(images), rtol=1e-4, atol=1e-5)


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = classifier()

    def forward(self, x):
        scores = self.body(x)
        return {"scores": scores, "best": scores.amax(1)}


@pytest.mark.parametrize("name", ["m.onnx", "m.pt2", pytest.param("m.xml", marks=needs("openvino"))])
def test_code_of_a_card_has_every_output(tmp_path, monkeypatch, name):
    shallow = merged(Heads().eval(), picture())
    (written,) = write_cards(shallow, [df.export(shallow, tmp_path / name)], None)
    images = torch.randn(3, 3, 9, 8)
    names = {"images": images if name == "m.pt2" else images.numpy()}
    monkeypatch.chdir(tmp_path)
    exec(written.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0], names)
    found = names["outputs"]
    if name == "m.onnx":
        found = dict(zip([each.name for each in names["session"].get_outputs()], found, strict=True))
    for key, wanted in shallow(images).items():
        torch.testing.assert_close(torch.as_tensor(found[key]), wanted, rtol=1e-4, atol=1e-5)


class Guided(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = classifier()

    def forward(self, image, *, guide):
        return self.body(image * guide)


@pytest.mark.parametrize("name", ["m.onnx", "m.pt2", pytest.param("m.xml", marks=needs("openvino"))])
def test_code_of_a_card_feeds_every_input(tmp_path, monkeypatch, name):
    shallow = merged(Guided().eval(), {"image": picture(), "guide": torch.rand(2, 1, 9, 8)})
    (written,) = write_cards(shallow, [df.export(shallow, tmp_path / name)], None)
    code = written.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    assert "# In this order: image, guide\n" in code
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(code.replace("zeros(", "ones("), names)
    found = torch.as_tensor(names["outputs"] if name == "m.pt2" else names["outputs"][0])
    wanted = shallow(torch.ones(2, 3, 9, 8), torch.ones(2, 1, 9, 8))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("measured", "hint"),
    [
        (None, "f32"),  # as the file was compared
        (Environment(runtime="openvino", precision="float32"), "f32"),
        (Environment(runtime="openvino", precision="bfloat16"), "bf16"),
        (Environment(runtime="onnxruntime", precision="tf32"), "f32"),  # not a measurement of OpenVINO
    ],
)
def test_card_of_an_openvino_file_asks_for_the_measured_precision(shallow, tmp_path, measured, hint):
    """By default OpenVINO computes in bfloat16 or float16 where the CPU can: other outputs, and another speed."""
    findings = None if measured is None else measured_run(environment=measured)
    text = card(shallow, tmp_path / "m.xml", findings, environment=Environment(runtime="openvino", precision="float32"))
    assert f'hint = {{"INFERENCE_PRECISION_HINT": "{hint}"}}\n' in text
    assert 'compile_model("m.xml", "CPU", hint)' in text


def test_file_that_is_asked_for_twice_is_written_once(shallow, tmp_path):
    (exported,) = export_files(shallow, tmp_path, ["model.pt2", "./model.pt2", "model.pt2"], None, None)
    assert exported.path == tmp_path / "model.pt2"
    assert int8_names(["model.onnx", "./model.onnx"]) == ("model-int8.onnx",)


def test_names_of_int8_files():
    assert int8_names(["model.onnx", "model.pt2", "exports/a.b.onnx"]) == ("model-int8.onnx", "exports/a.b-int8.onnx")
    with pytest.raises(InvalidValue, match=r"made from ONNX files, and the exports are model\.pt2\. Add model\.onnx"):
        int8_names(["model.pt2"])
    with pytest.raises(InvalidValue, match=r"The name 'm-int8\.onnx' is that of an INT8 file"):
        int8_names(["m.onnx", "m-int8.onnx"])


def test_findings_keep_why_the_times_of_an_int8_file_are_unreliable(tmp_path):
    doubtful = dataclasses.replace(COMPARED, unreliable="the INT8 file took 1 to 3 ms")
    exported = Exported(path=tmp_path / "m.onnx", format="ONNX", batch="dynamic", int8=doubtful)
    findings = with_int8(measured_run(), [exported])
    assert Findings.loads(findings.dumps()).int8[0].unreliable == "the INT8 file took 1 to 3 ms"


def test_requests_that_a_later_stage_would_refuse_are_refused_first():
    with pytest.raises(InvalidValue, match="INT8 files are made from ONNX files"):
        checked_options(df.Options(exports=("model.pt2",), int8=True))
    images = torch.rand(8, 3, 9, 8)
    task = df.ClassificationTask.tensors(train=(images, torch.arange(8) % 4))
    check_raw_images(task, None, images)
    with pytest.raises(InvalidValue, match="The images of this task are floats"):
        check_raw_images(task, "NHWC", images)
