"""export(): exported files compute the same as the network, with batches of any size."""

import sys
from pathlib import Path

import numpy
import onnx
import onnxruntime
import pytest
import torch
import torchvision
from torch import nn

import depthfold as df
from depthfold.backends import get
from depthfold.backends.onnxruntime import OnnxRuntime
from depthfold.errors import BackendError, InvalidValue, MissingDependency, ResultError, VerificationError
from depthfold.exporting import Exported
from depthfold.testing import randomise_statistics
from lacking import needs
from merged import Around, classifier, merged, picture
from nets import Net, conv, image

PLAN = df.Plan({1}, {1})


def small(run, **parts):
    """Return two convolutions, merged into one, followed by `run`."""
    torch.manual_seed(0)
    model = Net(lambda net, x: run(net, net.b(net.a(x))), a=conv(3, 4), b=conv(4, 4), **parts).eval()
    return merged(model, plan=df.Plan((), ()))


class DependsOnValues(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


def in_onnxruntime(path, *inputs):
    session = onnxruntime.InferenceSession(path)
    names = [info.name for info in session.get_inputs()]
    return session.run(None, dict(zip(names, (tensor.numpy() for tensor in inputs), strict=True)))


def close(found, wanted):
    numpy.testing.assert_allclose(found, wanted.detach().numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["m.onnx", "m.pt2", pytest.param("m.xml", marks=needs("openvino"))])
def test_exported_describes_the_file(tmp_path, name):
    shallow = merged(classifier(), plan=PLAN)
    shallow.train()  # the file is written in evaluation mode anyway
    done = df.export(shallow, tmp_path / "new" / name)
    assert shallow.training
    assert (done.path, done.batch, done.why_fixed) == (tmp_path / "new" / name, "dynamic", None)
    assert 0 <= done.error <= 1e-5
    assert done.environment.precision == "float32"
    assert done.environment.input_size == (3, 9, 8)
    beside = {"m.xml": ["m.bin", "m.xml"]}.get(name, [name])
    assert sorted(path.name for path in done.path.parent.iterdir()) == beside
    runtime = {"m.onnx": "ONNX", "m.pt2": "PyTorch program", "m.xml": "OpenVINO IR"}[name]
    assert f"{name}: {runtime}, for batches of any size; {done.environment.runtime} " in str(done)
    assert " of PyTorch" in str(done)


@pytest.mark.parametrize("name", ["m.onnx", "m.pt2"])
def test_surrounding_autocast_changes_nothing(tmp_path, name):
    shallow = merged(classifier(), plan=PLAN)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert df.export(shallow, tmp_path / name).error <= 1e-5


def test_torchvision_model_is_exported(tmp_path):
    model = randomise_statistics(torchvision.models.mobilenet_v2(width_mult=0.25, num_classes=5)).eval()
    sample = torch.randn(1, 3, 32, 32)
    shallow = merged(model, sample, seed=2)
    assert df.export(shallow, tmp_path / "m.onnx").batch == "dynamic"
    for batch in (1, 4):
        sample = torch.randn(batch, 3, 32, 32)
        close(in_onnxruntime(tmp_path / "m.onnx", sample)[0], shallow(sample))


def test_example_batch_of_one_gives_a_dynamic_batch(tmp_path):
    """PyTorch treats a size of 1 as a constant."""
    shallow = merged(classifier(), picture(1))
    assert df.export(shallow, tmp_path / "m.pt2").batch == "dynamic"
    again = torch.export.load(tmp_path / "m.pt2").module()
    for batch in (1, 4):
        assert torch.equal(again(picture(batch)), shallow(picture(batch)))


def test_onnx_file_contains_name_plan_and_version(tmp_path):
    model = onnx.load(df.export(merged(classifier(), plan=PLAN), tmp_path / "m.onnx").path)
    metadata = {prop.key: prop.value for prop in model.metadata_props}
    plan = '{"activations": [1], "cuts": [1]}'
    assert metadata == {"name": "Net", "plan": plan, "depthfold": df.__version__}


def test_unsupported_op_is_exported_by_pytorch_without_source_paths(tmp_path):
    """PyTorch's exporter writes paths of source files to the file."""
    shallow = small(lambda net, x: net.act(x), act=nn.GELU())
    done = df.export(shallow, tmp_path / "m.onnx")
    assert done.batch == "dynamic"
    close(in_onnxruntime(done.path, picture(5))[0], shallow(picture(5)))
    assert b"Gelu" in done.path.read_bytes()
    assert b".py" not in done.path.read_bytes()


@pytest.mark.parametrize("name", ["m.onnx", "m.pt2", pytest.param("m.xml", marks=needs("openvino"))])
def test_batch_is_fixed_if_the_network_needs_it(tmp_path, name, capsys):
    shallow = small(lambda net, x: x.reshape(2, 4, 72))
    done = df.export(shallow, tmp_path / name)
    assert done.batch == 2
    assert done.why_fixed.startswith("PyTorch cannot run this module with a batch of 3: shape '[2, 4, 72]' is invalid")
    assert done.error <= 1e-5
    assert f"for a batch of 2 ({done.why_fixed}); " in str(done)
    assert capsys.readouterr().err == ""  # torch.fx would print the failing graph
    if name == "m.onnx":
        close(in_onnxruntime(done.path, picture())[0], shallow(picture()))


def test_batch_is_fixed_if_the_runtime_needs_it(tmp_path):
    """squeeze() removes a batch dimension of 1, which ONNX cannot express."""
    shallow = small(lambda net, x: x.mean((2, 3)).squeeze())
    done = df.export(shallow, tmp_path / "m.onnx")
    assert done.batch == 2
    assert done.why_fixed.startswith("ONNX Runtime cannot run this module: ")
    close(in_onnxruntime(done.path, picture())[0], shallow(picture()))


def test_batch_is_fixed_if_the_file_is_wrong_with_another(tmp_path, monkeypatch):
    write = OnnxRuntime.export

    def wrong(self, module, inputs, path, *, dynamic_batch):
        module = nn.Sequential(module, nn.Sigmoid()) if dynamic_batch else module
        return write(self, module, inputs, path, dynamic_batch=dynamic_batch)

    monkeypatch.setattr(OnnxRuntime, "export", wrong)
    done = df.export(merged(classifier()), tmp_path / "m.onnx")
    assert done.batch == 2
    assert "m.onnx differs from the network by" in done.why_fixed
    assert done.why_fixed.endswith(" is allowed.")  # one sentence, without the advice of the error


def test_batch_is_fixed_if_requested(tmp_path):
    done = df.export(merged(classifier()), tmp_path / "m.onnx", dynamic_batch=False)
    assert (done.batch, done.why_fixed) == (2, None)
    with pytest.raises(Exception, match="invalid dimensions"):
        in_onnxruntime(done.path, picture(3))


def test_file_is_not_run_without_check(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    done = df.export(merged(classifier()), tmp_path / "m.onnx", check=False)
    assert (done.error, done.environment) == (None, None)
    assert str(done).endswith("m.onnx: ONNX, for batches of any size; not compared with PyTorch")
    with pytest.raises(MissingDependency, match=r"onnxruntime is not installed.*\.\[onnx\]"):
        df.export(merged(classifier()), tmp_path / "m.onnx")


@pytest.mark.parametrize("dynamic", [True, False])
def test_wrong_file_is_deleted(tmp_path, monkeypatch, dynamic):
    write = OnnxRuntime.export

    def wrong(self, module, inputs, path, **options):
        module.head.bias.data += 1e-2
        written = write(self, module, inputs, path, **options)
        module.head.bias.data -= 1e-2
        return written

    monkeypatch.setattr(OnnxRuntime, "export", wrong)
    (tmp_path / "m.onnx").write_bytes(b"existing")
    with pytest.raises(VerificationError, match=r"m\.onnx differs from the network by .* with a batch of 2"):
        df.export(merged(classifier()), tmp_path / "m.onnx", dynamic_batch=dynamic)
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]
    assert (tmp_path / "m.onnx").read_bytes() == b"existing"


def test_nested_outputs_are_exported(tmp_path):
    shallow = small(lambda net, x: {"maps": (x, [x.mean((2, 3))]), "sum": x.sum(1)})
    sample = picture(3)
    wanted = shallow(sample)
    found = in_onnxruntime(df.export(shallow, tmp_path / "m.onnx").path, sample)
    for one, two in zip(found, (wanted["maps"][0], wanted["maps"][1][0], wanted["sum"]), strict=True):
        close(one, two)
    df.export(shallow, tmp_path / "m.pt2")
    again = torch.export.load(tmp_path / "m.pt2").module()(sample)
    assert torch.equal(again["maps"][1][0], wanted["maps"][1][0])


@pytest.mark.parametrize("name", ["m.onnx", pytest.param("m.xml", marks=needs("openvino"))])
def test_numbers_and_text_in_the_output_are_left_out(tmp_path, name):
    shallow = small(lambda net, x: {"stride": 4, "out": net.act(x), "name": ["a", None]}, act=nn.GELU())
    done = df.export(shallow, tmp_path / name)
    assert (done.batch, done.why_fixed) == ("dynamic", None)
    assert done.error <= 1e-5


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = conv(), conv()

    def forward(self, x, mask=None, scale=None):
        x = self.b(self.a(x))
        return x if scale is None else x * scale


def test_several_inputs_and_an_omitted_one(tmp_path):
    sample, scale = image(), torch.rand(1)
    shallow = merged(TwoInputs().eval(), {"x": sample, "scale": scale}, df.Plan((), ()))
    done = df.export(shallow, tmp_path / "m.onnx")
    assert done.batch == "dynamic"
    close(in_onnxruntime(done.path, image(batch=4), scale)[0], shallow(image(batch=4), scale))


def test_merged_part_of_a_model_is_exported(tmp_path):
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone, self.head = classifier(), nn.Linear(4, 2)

        def forward(self, image):
            return self.head(self.backbone(image))

    shallow = merged(Whole(), at="backbone")
    assert df.export(shallow, tmp_path / "whole.onnx").batch == "dynamic"
    close(in_onnxruntime(tmp_path / "whole.onnx", picture(3))[0], shallow(picture(3)))
    df.export(shallow.backbone, tmp_path / "part.onnx")  # the part alone is also a network
    close(in_onnxruntime(tmp_path / "part.onnx", picture(3))[0], shallow.backbone(picture(3)))


def test_wrapper_needs_example_inputs(tmp_path):
    whole = nn.Sequential(merged(classifier()), nn.Sigmoid())
    with pytest.raises(InvalidValue, match=r"Sequential wraps the merged network, so its inputs are not known"):
        df.export(whole, tmp_path / "m.onnx")
    df.export(whole, tmp_path / "m.onnx", picture())
    close(in_onnxruntime(tmp_path / "m.onnx", picture(3))[0], whole(picture(3)))


def test_loaded_network_is_exported(tmp_path):
    with torch.device("meta"):
        model = classifier()
    shallow = df.load(df.save(merged(classifier()), tmp_path), model)
    df.export(shallow, tmp_path / "m.onnx")
    close(in_onnxruntime(tmp_path / "m.onnx", picture(3))[0], shallow(picture(3)))


def test_half_precision_is_exported(tmp_path):
    done = df.export(merged(classifier()).half(), tmp_path / "m.onnx")
    assert done.environment.precision == "float16"
    assert in_onnxruntime(done.path, picture(3).half())[0].dtype == numpy.float16


IMPOSSIBLE = {
    ("m.onnx", torch.bfloat16): "written in bfloat16: ONNX has no convolutions in bfloat16 before opset 22",
    ("m.onnx", torch.float64): "compared with PyTorch in float64: ONNX Runtime has no convolutions in float64",
    ("m.xml", torch.bfloat16): "compared with PyTorch in bfloat16: OpenVINO takes NumPy arrays, which have no bfloat16",
    ("m.xml", torch.float64): "compared with PyTorch in float64: OpenVINO computes in float32",
}


@pytest.mark.parametrize("name, dtype", IMPOSSIBLE)
@needs("openvino")
def test_impossible_precision_is_refused(tmp_path, name, dtype):
    shallow = merged(classifier()).to(dtype)
    with pytest.raises(InvalidValue) as caught:
        df.export(shallow, tmp_path / name)
    fix = "Convert the network with shallow.float(), or export to .pt2."
    assert str(caught.value) == f"{name} cannot be {IMPOSSIBLE[name, dtype]}. {fix}"
    assert not list(tmp_path.iterdir())
    df.export(shallow, tmp_path / "m.pt2")
    df.export(shallow.float(), tmp_path / name)


@needs("openvino")
def test_file_that_cannot_be_compared_is_written_without_check(tmp_path):
    for name, dtype in IMPOSSIBLE:
        shallow = merged(classifier()).to(dtype)
        if (name, dtype) == ("m.onnx", torch.bfloat16):
            with pytest.raises(InvalidValue, match="cannot be written in bfloat16"):
                df.export(shallow, tmp_path / name, check=False)
        else:
            assert df.export(shallow, tmp_path / name, check=False).batch == "dynamic"


@pytest.mark.parametrize(
    "name, hint",
    [("m.onxn", "Did you mean 'm.onnx'?"), ("m.pt", "Did you mean 'm.pt2'?"), ("m", "of 'm'. Known suffixes: ")],
)
def test_unknown_suffix_is_refused(tmp_path, name, hint):
    with pytest.raises(InvalidValue) as caught:
        df.export(merged(classifier()), tmp_path / name)
    assert f"does not know the suffix of {name!r}. " in str(caught.value)
    assert hint in str(caught.value)
    assert ".onnx (ONNX), .pt2 (PyTorch program), .xml (OpenVINO IR), .engine (TensorRT engine)." in str(caught.value)


def test_only_merged_networks_are_exported(tmp_path):
    traced = df.trace(classifier(), picture())
    for other in (df.rewrite(traced, traced.vanilla), nn.Conv2d(3, 3, 3)):
        with pytest.raises(InvalidValue, match=rf"{type(other).__name__} is not a merged network"):
            df.export(other, tmp_path / "m.onnx")


def test_invalid_example_inputs_are_refused(tmp_path):
    shallow = merged(classifier())
    with pytest.raises(
        InvalidValue, match=r"The example inputs do not fit forward\(x\).*: too many positional arguments"
    ):
        df.export(shallow, tmp_path / "m.onnx", (picture(), picture()))
    with pytest.raises(
        InvalidValue, match=r"accepts only positional tensors whose first dimension is the batch, found list for forw"
    ):
        df.export(shallow, tmp_path / "m.onnx", [picture()])
    with pytest.raises(BackendError, match=r"PyTorch cannot run this module with a batch of 1: "):
        df.export(shallow, tmp_path / "m.onnx", torch.zeros(1, 5, 9, 8))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["m.onnx", "m.pt2"])
def test_failing_export_shows_the_cause_and_not_the_graph(tmp_path, name, capfd):
    """The message of PyTorch's ONNX exporter starts with advice for its developers."""
    shallow = small(lambda net, x: net.act(x), act=DependsOnValues())
    with pytest.raises(BackendError, match=r"^PyTorch cannot export this module.*: Could not guard on data-dependent"):
        df.export(shallow, tmp_path / name)
    assert capfd.readouterr().err == ""


def test_failing_export_leaves_no_file(tmp_path):
    with pytest.raises(BackendError, match=r"PyTorch cannot export this module: "):
        df.export(merged(Around(), at="backbone"), tmp_path / "m.pt2")
    assert not list(tmp_path.iterdir())


def test_tensorrt_is_explained(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(MissingDependency, match=r"tensorrt is not installed.*pip install -e .\.\[tensorrt\]."):
        df.export(merged(classifier()), tmp_path / "m.engine")
    with pytest.raises(BackendError, match="has a fixed batch size"):
        get("tensorrt").export(classifier(), (picture(),), tmp_path / "m.engine", dynamic_batch=True)


@pytest.mark.parametrize(("name", "writes"), [("m.onnx", 1), ("m.onnx", 2), ("m.pt2", 1)])
def test_full_disk_leaves_no_file(name, writes, tmp_path, monkeypatch):
    """An ONNX file is written a second time with its metadata. PyTorch's own writer would end the process."""
    write, calls = Path.write_bytes, []

    def full(path, data):
        calls.append(path)
        if len(calls) == writes:
            raise OSError(28, "No space left on device")
        return write(path, data)

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(ResultError, match=r"m\.\w+ cannot be written: No space left on device\. Check the folder"):
        df.export(merged(classifier()), tmp_path / name)
    assert not list(tmp_path.iterdir())


@needs("openvino")
def test_full_disk_below_openvino(tmp_path, monkeypatch):
    def full(*_, **__):
        raise RuntimeError("basic_ios::clear: iostream error")

    monkeypatch.setattr("openvino.save_model", full)
    with pytest.raises(ResultError, match=r"m\.xml cannot be written: OpenVINO could not .*\. Check the folder"):
        df.export(merged(classifier()), tmp_path / "m.xml")
    assert not list(tmp_path.iterdir())


def test_exported_is_frozen(tmp_path):
    done = Exported(path=tmp_path, format="ONNX", batch=3)
    with pytest.raises(AttributeError):
        done.batch = 4
