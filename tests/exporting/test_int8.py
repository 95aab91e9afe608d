"""INT8 files: the weights and activations are in 8 bits, and scores and latencies are those of the file itself."""

import dataclasses

import numpy
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import depthfold as df
from depthfold.core import Environment
from depthfold.demo.demo import model
from depthfold.demo.network import task as demo_task
from depthfold.errors import BackendError, InvalidValue, VerificationError
from depthfold.exporting import Int8, Quantised, int8
from depthfold.exporting.int8 import calibration_inputs
from depthfold.training import FunctionTask
from merged import classifier, merged, picture


@pytest.fixture(scope="module")
def task():
    """Return a task with images of the size of picture()."""
    images = picture(120)
    labels = torch.arange(120) % 4
    return df.ClassificationTask.tensors(train=(images[:80], labels[:80]), test=(images[80:], labels[80:]))


@pytest.fixture(scope="module")
def demo():
    """Return the demo network, merged but with all its layers, and 500 of its test images."""
    whole = demo_task()
    part = whole.source.read("test")
    test = part.images.pixels[:500], part.labels[:500]
    train = whole.source.read("train")
    data = df.ClassificationTask.tensors(
        train=(train.images.pixels[:200], train.labels[:200]), test=test, normalise=whole.source.mean_std
    )
    traced = df.trace(model(), data.example())
    return df.merge(df.rewrite(traced, traced.vanilla)), data


def test_demo_in_int8_loses_at_most_half_a_point(demo, tmp_path):
    shallow, data = demo
    done = df.export(shallow, tmp_path / "m.onnx", task=data, int8=Int8(tolerance=0.5))
    assert done.int8.score >= done.int8.float32_score - 0.5
    assert done.int8.float32_score == pytest.approx(data.score(shallow, "test"), abs=0.21)  # at most one image
    # The score is that of the file on the disk, computed here without depthfold.
    images, labels = data.source.test
    mean, deviation = (numpy.float32(values) for values in data.normalise)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    raw = (images.numpy() / numpy.float32(255) - mean) / deviation
    (found,) = session.run(None, {session.get_inputs()[0].name: raw})
    assert 100 * (found.argmax(1) == labels.numpy()).mean() == pytest.approx(done.int8.score, abs=0.21)
    kinds = [node.op_type for node in onnx.load(done.path).graph.node]
    assert kinds.count("Conv") == 31
    assert kinds.count("QuantizeLinear") >= 31
    assert "ReduceMean" not in kinds  # it would be computed in float32


def test_weights_have_a_scale_for_each_output_channel(tmp_path, task):
    done = df.export(merged(classifier()), tmp_path / "m.onnx", task=task, int8=Int8(tolerance=100))
    graph = onnx.load(done.path).graph
    weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    convs = [node for node in graph.node if node.op_type == "Conv"]
    made = {node.output[0]: node for node in graph.node if node.op_type == "DequantizeLinear"}
    assert convs
    for conv in convs:
        source = made[conv.input[1]]
        assert weights[source.input[0]].dtype == numpy.int8
        assert weights[source.input[1]].shape == (len(weights[source.input[0]]),)


@pytest.mark.parametrize(
    ("machine", "signed"), [("x86_64", False), ("AMD64", False), ("aarch64", True), ("arm64", True)]
)
def test_activations_are_unsigned_on_x86(tmp_path, task, monkeypatch, machine, signed):
    monkeypatch.setattr("platform.machine", lambda: machine)
    done = df.export(merged(classifier()), tmp_path / "m.onnx", task=task, int8=Int8(tolerance=100))
    graph = onnx.load(done.path).graph
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    inputs = [constants[node.input[2]].dtype for node in graph.node if node.op_type == "QuantizeLinear"]
    assert inputs and set(inputs) == {numpy.dtype(numpy.int8 if signed else numpy.uint8)}


def test_exported_describes_both_files(tmp_path, task):
    done = df.export(merged(classifier()), tmp_path / "m.onnx", task=task, int8=Int8(tolerance=100))
    assert done.batch == "dynamic"
    assert done.environment.precision == "int8"
    assert done.error <= 1e-5  # of the float32 file
    assert min(done.int8.latency, done.int8.float32_latency) > 0
    assert done.int8.environment.threads == torch.get_num_threads()
    assert "m.onnx: ONNX in INT8, for batches of any size; onnxruntime " in str(done)
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]
    model = onnx.load(done.path)
    assert {prop.key for prop in model.metadata_props} >= {"name", "plan", "depthfold"}
    kinds = [node.op_type for node in model.graph.node]
    assert "GlobalAveragePool" in kinds  # x.mean((2, 3)), without keepdim
    assert "ReduceMean" not in kinds


def test_text_of_a_comparison():
    compared = Quantised(
        split="test", score=91.12, float32_score=91.18, latency=0.35, float32_latency=0.7,
        environment=Environment(threads=1),
    )  # fmt: skip
    text = "score 91.12 on the test set (float32: 91.18), 0.35 ms (float32: 0.7 ms, 2.00x as fast)"
    assert str(compared) == f"{text} with 1 thread"
    assert str(dataclasses.replace(compared, environment=Environment())) == text
    doubtful = dataclasses.replace(compared, unreliable="the INT8 file took 0.3 to 0.5 ms")
    assert "0.35 ms (float32: 0.7 ms, 2.00x as fast, unreliable: the INT8 file took 0.3 to 0.5 ms)" in str(doubtful)


def test_both_files_are_timed_on_the_target(tmp_path, task, monkeypatch):
    used = []

    def times(files):
        used.extend(compiled._session.get_session_options().intra_op_num_threads for compiled in files)
        return [(0.5, 0.5, 0.5), (1.0, 1.0, 2.0)]

    monkeypatch.setattr(int8, "_times", times)
    settings = Int8(tolerance=100, target="onnxruntime:threads=3")
    done = df.export(merged(classifier()), tmp_path / "m.onnx", task=task, int8=settings)
    assert used == [3, 3]
    assert (done.int8.environment.threads, done.int8.environment.precision) == (3, None)
    why = "the float32 file took 1 to 2 ms; something else was probably running"
    assert str(done).endswith(f"0.5 ms (float32: 1 ms, 2.00x as fast, unreliable: {why}) with 3 threads")


def test_calibration_sees_training_images_only(task):
    shallow = merged(classifier())
    shallow.train()
    batches = int8.calibration_inputs(shallow, task, 40)
    assert [len(images) for (images,) in batches] == [20, 20]
    known = {image.numpy().tobytes() for image in task._data.train.images.pixels}
    assert all(image.numpy().tobytes() in known for (images,) in batches for image in images)
    assert shallow.training
    assert not shallow._forward_pre_hooks


def test_file_that_loses_too_much_is_deleted(tmp_path, task):
    """The training images are so dark that the ranges of their activations clip those of the test images."""
    shallow = merged(classifier())
    (train, labels), (test, _) = task.source.train, task.source.test
    last = [part for part in shallow.modules() if isinstance(part, nn.Linear)][-1]
    with torch.no_grad():
        last.bias -= shallow(test).mean(0)  # otherwise it would see one class everywhere, also in INT8
    right = shallow(test).argmax(1)  # the network is right about all test images
    assert right.bincount().max() < 0.9 * len(right)
    task = df.ClassificationTask.tensors(train=(train / 1000, labels), test=(test, right))
    (tmp_path / "m.onnx").write_bytes(b"existing")
    with pytest.raises(
        VerificationError, match=r"The INT8 file scores .* on the test set, and float32 100; it may lose 1\. Calibrate"
    ):
        df.export(shallow, tmp_path / "m.onnx", task=task, int8=True)
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]
    assert (tmp_path / "m.onnx").read_bytes() == b"existing"


def test_loss_that_is_allowed_by_default_is_in_the_unit_of_the_task(tmp_path, task):
    share = FunctionTask(loss=task.loss, score=lambda *_: 0.0)
    assert Int8().allowed_loss(task, 90.0) == 1.0 == Int8(tolerance=1.0).allowed_loss(share, 0.9)
    assert Int8().allowed_loss(share, 0.9) == pytest.approx(0.009) == Int8().allowed_loss(share, -0.9)
    scores = iter([0.85, 0.9])  # of INT8 and of float32
    failing = FunctionTask(loss=task.loss, score=lambda *_: next(scores))
    with pytest.raises(VerificationError, match=r"scores 0\.85 .* float32 0\.9; it may lose 0\.009\. Calibrate"):
        df.export(merged(classifier()), tmp_path / "m.onnx", task=failing, int8=True)


def test_any_task_can_calibrate_and_score(tmp_path):
    images = picture(64)

    def loss(network, step):
        return network(images[: step.recipe.batch]).sum()

    def score(network, split):
        assert split == "holdout"
        return float(network(images[:7]).mean())

    done = df.export(
        merged(classifier()),
        tmp_path / "m.onnx",
        task=FunctionTask(loss=loss, score=score),
        int8=Int8(images=8, tolerance=1e9, split="holdout"),
    )
    assert done.int8.score != done.int8.float32_score


def test_score_that_is_not_a_number_is_refused(tmp_path):
    task = FunctionTask(loss=lambda network, step: network(picture(8)).sum(), score=lambda *_: {"top-1": 0.5})
    with pytest.raises(InvalidValue, match=r"score must be a single number, higher for a better model, found dict\."):
        df.export(merged(classifier()), tmp_path / "m.onnx", task=task, int8=Int8(images=8))


def test_file_is_not_scored_without_check(tmp_path, task):
    done = df.export(merged(classifier()), tmp_path / "m.onnx", task=task, int8=True, check=False)
    assert done.int8 is None
    assert done.format == "ONNX in INT8"
    assert b"QuantizeLinear" in done.path.read_bytes()


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("m.pt2", {"int8": True}, r"Only ONNX files can be in INT8, found 'm\.pt2'\. Use m\.onnx\."),
        ("m.onnx", {"int8": True, "task": None}, r"calibrated and scored on a task, and there is none\. Pass task="),
        ("m.onnx", {"int8": 8}, r"int8 is True, False or Int8\(\.\.\.\), found 8\."),
    ],
)
def test_invalid_requests_are_refused(tmp_path, task, name, options, message):
    with pytest.raises(InvalidValue, match=message):
        df.export(merged(classifier()), tmp_path / name, **{"task": task, **options})
    assert not list(tmp_path.iterdir())


def test_other_precisions_and_batches_are_refused(tmp_path, task):
    with pytest.raises(InvalidValue, match=r"made from a network in float32, found torch\.float64\. Convert it"):
        df.export(merged(classifier()).double(), tmp_path / "m.onnx", task=task, int8=True)
    with pytest.raises(BackendError, match=r"INT8 needs a file for batches of any size\. Leave out dynamic_batch"):
        df.export(merged(classifier()), tmp_path / "m.onnx", task=task, int8=True, dynamic_batch=False)
    assert not list(tmp_path.iterdir())


def test_invalid_settings_are_refused():
    for options, message in [({"images": 0}, "images of a calibration"), ({"tolerance": -1.0}, "at least 0, found -1")]:
        with pytest.raises(InvalidValue, match=message):
            Int8(**options)
    with pytest.raises(InvalidValue, match=r"The split of an INT8 file is 'holdout' or 'test', found 'train'\."):
        Int8(split="train")
    with pytest.raises(InvalidValue, match=r"timed by ONNX Runtime, found the target 'pytorch'\. Use onnxruntime"):
        Int8(target="pytorch:threads=1")
    with pytest.raises(dataclasses.FrozenInstanceError):
        Int8().images = 3


class Joint(nn.Module):
    """A network with two inputs, which are not alike."""

    def __init__(self):
        super().__init__()
        self.inner = classifier()

    def forward(self, x, shift):
        return self.inner(x + shift[:, :, None, None])


def test_network_that_is_called_by_name_is_quantised(tmp_path):
    """The names have another order than the parameters, and the file knows the inputs by their positions."""
    images, shifts = picture(24), picture(24).mean((2, 3)) - 0.5

    def called(model, number):
        return model(shift=shifts[:number], x=images[:number])

    def score(model, split):
        return called(model, 24).mean().item()

    task = FunctionTask(loss=lambda model, step: called(model, step.recipe.batch).sum(), score=score)
    shallow = merged(Joint(), (images[:1], shifts[:1]))
    ((x, shift),) = calibration_inputs(shallow, task, 8)
    assert torch.equal(x, images[:8]) and torch.equal(shift, shifts[:8])
    done = df.export(shallow, tmp_path / "m.onnx", task=task, int8=Int8(images=8, tolerance=1e9))
    assert done.int8.float32_score == pytest.approx(score(shallow.eval(), "test"), abs=1e-4)


@pytest.mark.parametrize(
    "call", [lambda net: net(picture(), None), lambda net: net(picture(), size=2)], ids=["None", "size"]
)
def test_network_that_is_called_with_other_values_than_tensors_is_refused(call):
    class Sized(nn.Conv2d):
        def forward(self, x, size=1):
            return super().forward(x)

    network = Sized(3, 3, 1)
    task = FunctionTask(loss=lambda net, step: call(net).sum(), score=lambda net, split: 0.0)
    with pytest.raises(
        InvalidValue, match=r"calls with tensors only, found Tensor, (int|NoneType) for .* Export a module"
    ):
        calibration_inputs(network, task, 1)
    assert not network._forward_pre_hooks


@pytest.mark.parametrize("images", [5, 32, 40, 128])
def test_calibration_reads_as_many_images_as_asked(images, task):
    assert sum(len(batch[0]) for batch in calibration_inputs(merged(classifier()), task, images)) == images


class InDict(nn.Module):
    """A network that returns its outputs in a dict, like those for segmentation of torchvision."""

    def __init__(self):
        super().__init__()
        self.inner = classifier()

    def forward(self, x):
        scores = self.inner(x)
        return {"out": scores, "aux": (scores.mean(1), None)}


def test_network_that_returns_a_dict_is_scored(tmp_path, task):
    def loss(model, step):
        images, labels = task.batch(step)
        return nn.functional.cross_entropy(model(images)["out"], labels)

    def score(model, split):
        images, labels = task.source.test
        found = model(images)
        assert found["aux"][0].shape == labels.shape and found["aux"][1] is None
        return float((found["out"].argmax(1) == labels).float().mean()) * 100

    part = FunctionTask(loss=loss, score=score, epoch_steps=2)
    done = df.export(merged(InDict()), tmp_path / "m.onnx", task=part, int8=Int8(tolerance=100))
    assert 0 <= done.int8.score <= 100 and done.int8.float32_score == score(merged(InDict()), "test")
