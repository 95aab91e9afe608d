"""Files that take raw images, and what a file states about its inputs."""

import json

import numpy
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import depthfold as df
from depthfold.backends import RawImages
from depthfold.errors import InvalidValue, VerificationError
from depthfold.exporting import Int8
from depthfold.tasks import Preprocessing
from depthfold.training import FunctionTask
from lacking import needs
from merged import classifier, merged

MEAN, DEVIATION = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


@pytest.fixture(scope="module")
def task():
    """Return a task of raw images of the size that classifier() is traced with."""
    images = torch.randint(256, (120, 3, 9, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(120) % 4
    return df.ClassificationTask.tensors(
        train=(images[:80], labels[:80]), test=(images[80:], labels[80:]), normalise=(MEAN, DEVIATION)
    )


def expected(shallow, raw):
    """Return the outputs for raw images (N x H x W x C), normalised in NumPy and float64."""
    wanted = (raw / 255 - numpy.array(MEAN)) / numpy.array(DEVIATION)
    with torch.no_grad():
        return shallow(torch.from_numpy(wanted.transpose(0, 3, 1, 2)).float()).numpy()


def raw_images(batch):
    return numpy.random.default_rng(1).integers(0, 256, (batch, 9, 8, 3), dtype=numpy.uint8)


def in_file(path, raw):
    """Run the file in the runtime of its format."""
    if path.suffix == ".onnx":
        session = onnxruntime.InferenceSession(path)
        return session.run(None, {session.get_inputs()[0].name: raw})[0]
    if path.suffix == ".pt2":
        return torch.export.load(path).module()(torch.from_numpy(raw)).detach().numpy()
    import openvino

    return openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})([raw])[0]


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("name", ["m.onnx", "m.pt2", pytest.param("m.xml", marks=needs("openvino"))])
def test_file_normalises_raw_images_as_the_task_does(tmp_path, task, name, layout):
    shallow = merged(classifier())
    done = df.export(shallow, tmp_path / name, task=task, raw_images=layout)
    assert done.batch == "dynamic"
    assert done.error <= 1e-5
    assert f"for batches of any size of raw images ({layout}); " in str(done)
    for batch in (1, 5):
        raw = raw_images(batch)
        given = raw if layout == "NHWC" else numpy.ascontiguousarray(raw.transpose(0, 3, 1, 2))
        numpy.testing.assert_allclose(in_file(done.path, given), expected(shallow, raw), rtol=1e-4, atol=1e-5)


def test_wrong_normalisation_is_found(tmp_path, task, monkeypatch):
    """The file is compared with the normalisation of the task, not with its own."""
    honest = RawImages.__init__

    def swapped(self, network, mean, deviation, layout):
        honest(self, network, mean[::-1], deviation, layout)

    monkeypatch.setattr(RawImages, "__init__", swapped)
    for int8 in (False, Int8(tolerance=100)):
        with pytest.raises(VerificationError, match="differs from the network by"):
            df.export(merged(classifier()), tmp_path / "m.onnx", task=task, raw_images="NHWC", int8=int8)
    assert not list(tmp_path.iterdir())


def test_int8_file_takes_raw_images(tmp_path, task):
    shallow = merged(classifier())
    done = df.export(shallow, tmp_path / "m.onnx", task=task, raw_images="NHWC", int8=Int8(tolerance=100))
    raw = raw_images(6)
    found, wanted = in_file(done.path, raw), expected(shallow, raw)
    assert abs(found - wanted).max() < 0.1 * abs(wanted).max()
    kinds = [node.op_type for node in onnx.load(done.path).graph.node]
    assert kinds[:4] == ["Transpose", "Cast", "Sub", "Div"]  # the normalisation itself is in float32


def test_graph_is_the_same_behind_the_normalisation(tmp_path, task):
    shallow = merged(classifier())
    plain, raw = (
        onnx.load(df.export(shallow, tmp_path / "m.onnx", task=task, raw_images=layout).path)
        for layout in (None, "NCHW")
    )
    assert [node.op_type for node in raw.graph.node[:3]] == ["Cast", "Sub", "Div"]
    assert list(raw.graph.node[3:]) == list(plain.graph.node)
    assert raw.graph.input[0].name == "images"


def test_metadata_state_the_preprocessing(tmp_path, task):
    shallow, found = merged(classifier()), {}
    for layout in (None, "NHWC"):
        model = onnx.load(df.export(shallow, tmp_path / "m.onnx", task=task, raw_images=layout).path)
        found[layout] = {prop.key: prop.value for prop in model.metadata_props}
    stated = found[None]
    assert tuple(json.loads(stated["mean"])) == MEAN
    assert tuple(json.loads(stated["deviation"])) == DEVIATION
    assert json.loads(stated["size"]) == [9, 8]
    assert json.loads(stated["classes"]) == ["0", "1", "2", "3"]
    assert stated["input"] == "NCHW, normalised: (x / 255 - mean) / deviation"
    assert found["NHWC"] == {**stated, "input": "uint8 NHWC, normalised in this file"}


def test_preprocessing_of_a_task(task):
    assert task.preprocessing == Preprocessing(
        channels=3, size=(9, 8), mean=MEAN, deviation=DEVIATION, classes=("0", "1", "2", "3")
    )
    assert str(task.preprocessing) == (
        "3 x 9 x 8; (x / 255 - mean) / deviation with mean 0.4, 0.5, 0.6 and deviation 0.2, 0.25, 0.3"
    )
    resized = df.ClassificationTask.tensors(train=task.source.train, size=4, normalise=((0.5,), (0.25,)))
    assert resized.preprocessing.size == (4, 4)
    assert resized.preprocessing.mean == (0.5, 0.5, 0.5)


def test_network_in_half_precision_takes_raw_images(tmp_path, task):
    shallow = merged(classifier()).half()
    done = df.export(shallow, tmp_path / "m.onnx", task=task, raw_images="NHWC")
    raw = raw_images(2)
    numpy.testing.assert_allclose(in_file(done.path, raw), expected(shallow.float(), raw), rtol=2e-2, atol=2e-2)


def test_name_of_the_input_is_free(tmp_path, task):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = classifier()

        def forward(self, images):
            return self.body(images)

    shallow = merged(Named().eval(), task.example())
    done = df.export(shallow, tmp_path / "m.onnx", task=task, raw_images="NHWC")
    assert onnx.load(done.path).graph.input[0].name == "raw_images"


def test_names_of_the_normalisation_are_free(tmp_path, task):
    model = nn.Sequential()
    model.add_module("images", nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)))
    model.add_module("images_sub", nn.ReLU())
    shallow = merged(model.eval(), task.example(), df.Plan({1, 2}, {1}))
    done = df.export(shallow, tmp_path / "m.onnx", task=task, raw_images="NHWC")
    raw = raw_images(2)
    numpy.testing.assert_allclose(in_file(done.path, raw), expected(shallow, raw), rtol=1e-4, atol=1e-5)


def test_requests_without_raw_images_are_refused(tmp_path, task):
    shallow, floats = merged(classifier()), (torch.rand(8, 3, 9, 8), torch.arange(8) % 4)
    function = FunctionTask(loss=lambda net, step: 0.0, score=lambda net, split: 0.0)
    for given, layout, message in [
        (None, "NHWC", r"normalised as by a ClassificationTask, and there is none\. Pass task="),
        (function, "NHWC", r"as by a ClassificationTask, and found FunctionTask\."),
        (task, "HWC", r"The layout of raw images is NHWC or NCHW, found 'HWC'\."),
        (df.ClassificationTask.tensors(train=floats), "NHWC", "The images of this task are floats"),
        (
            df.ClassificationTask.tensors(train=task.source.train, size=5),
            "NHWC",
            r"The images of the task have the shape \(3, 5, 5\), and the inputs of the network \(3, 9, 8\)",
        ),
    ]:
        with pytest.raises(InvalidValue, match=message):
            df.export(shallow, tmp_path / "m.onnx", task=given, raw_images=layout)
    assert not list(tmp_path.iterdir())
