"""The ONNX writer: its models compute the same as PyTorch, and unsupported modules go through PyTorch's exporter."""

from collections import OrderedDict
from typing import NamedTuple

import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from depthfold.backends import backend_errors, get
from depthfold.backends.base import flatten
from depthfold.backends.onnx_ops import UnsupportedOp
from depthfold.backends.onnx_writer import export_with_pytorch, onnx_bytes, write_model
from depthfold.errors import BackendError
from depthfold.testing import check_backend, randomise_statistics
from lacking import needs


class Function(nn.Module):
    """A forward given as a function of the input and a convolution."""

    def __init__(self, function):
        super().__init__()
        self.conv, self.function = nn.Conv2d(4, 4, 3, padding=1), function

    def forward(self, x):
        return self.function(x, self.conv)


class Heads(NamedTuple):
    x: torch.Tensor
    depth: torch.Tensor


class Keyword(nn.Module):
    """A forward that gives the input to a module by name."""

    def __init__(self, module):
        super().__init__()
        self.conv, self.module = nn.Conv2d(4, 4, 3, padding=1), module

    def forward(self, x):
        return self.module(input=self.conv(x))


def head(x, conv):
    return torch.flatten(F.adaptive_avg_pool2d(conv(x), (1, 1)), 1)


def overwritten(x, conv):
    y = conv(x)
    z = F.relu(y, inplace=True)
    return y + z


def overwritten_view(x, conv):
    y = conv(x)
    z = y.flatten(1)
    z += z
    return y, z


def written(module, sample):
    with torch.no_grad():
        return write_model(module.eval(), (sample,), flatten(module(sample.clone())))


SUPPORTED = {
    "same": nn.Conv2d(4, 4, (2, 5), padding="same", dilation=(1, 2)),
    "valid": nn.Conv2d(4, 4, 3, padding="valid", bias=False),
    "norm": nn.Sequential(nn.BatchNorm2d(4, eps=0.1), nn.Dropout(), nn.Identity()),
    "activations": nn.Sequential(nn.Hardtanh(-0.5, 0.7), nn.SiLU(), nn.Hardswish(), nn.Hardsigmoid(), nn.Sigmoid()),
    "in place": nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 1), nn.ReLU6(inplace=True)),
    "pools": nn.Sequential(nn.MaxPool2d(3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)),
    "classifier": nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3), nn.ReLU(True), nn.Linear(3, 2)),
    "functions": Function(lambda x, c: F.silu(F.hardswish(F.relu6(c(x)))) + torch.sigmoid(x).relu()),
    "iadd": Function(lambda x, c: (c(x).add_(x)) * F.hardsigmoid(x)),
    "concatenation": Function(lambda x, c: torch.cat([c(x), x], dim=1)),
    "padding": Function(lambda x, c: c(F.pad(x, (1, 0, 2, 3)))),
    "padding of channels": Function(lambda x, c: F.pad(c(x), (0, 0, 0, 0, 0, 2))),
    "max pool": Function(lambda x, c: F.max_pool2d(c(x), 2)),
    "mean": Function(lambda x, c: c(x).mean([2, 3])),
    "kept mean": Function(lambda x, c: c(x) * x.mean((-1, -2), keepdim=True)),
    "head": Function(head),
    "two outputs": Function(lambda x, c: (c(x), x)),
}


@pytest.mark.parametrize("name", SUPPORTED)
def test_supported_op_computes_the_same_as_pytorch(name):
    module, sample = randomise_statistics(SUPPORTED[name]), torch.randn(2, 4, 9, 8)
    model = written(module, sample)
    onnx.checker.check_model(model, full_check=True)
    check_backend(get("onnxruntime"), cases={name: (module, (sample,))})


# Modules whose names the writer would also give to values of its own.
CLASHING = {
    "outputs": OrderedDict(output=nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))),
    "outputs with underscores": OrderedDict(output_0=nn.Conv2d(4, 4, 1), output_0_=nn.ReLU()),
    "gates": OrderedDict(act=nn.SiLU(), act_gate=nn.Conv2d(4, 4, 1)),
}


@pytest.mark.parametrize("name", CLASHING)
def test_names_of_modules_do_not_clash_with_those_of_the_writer(name):
    module, sample = nn.Sequential(CLASHING[name]), torch.randn(2, 4, 9, 8)
    onnx.checker.check_model(written(module, sample), full_check=True)
    check_backend(get("onnxruntime"), cases={name: (module, (sample,))})


UNSUPPORTED = {
    "another module": nn.GELU(),
    "reflection": nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
    "cropping": Function(lambda x, c: c(F.pad(x, (-1, 0)))),
    "a number": Function(lambda x, c: c(x) + 1),
    "an option": Function(lambda x, c: torch.add(c(x), x, alpha=2)),
    "ceil mode": nn.MaxPool2d(2, ceil_mode=True),
    "a pool to 2x2": nn.AdaptiveAvgPool2d(2),
    "a linear layer on a feature map": nn.Sequential(nn.Linear(8, 3)),
    "in place and read again": Function(overwritten),
    "in place on a view": Function(overwritten_view),
    "in place on the input": nn.ReLU(inplace=True),
    "control flow": Function(lambda x, c: c(x) if x.sum() > 0 else x),
    "a size": Function(lambda x, c: c(x).reshape(x.shape[0], -1)),
    "a dropout called with a keyword": Keyword(nn.Dropout()),
    "an identity called with a keyword": Keyword(nn.Identity()),
    "a padding of something flat": Function(lambda x, c: F.pad(c(x).flatten(1), (0, 2))),
    "a padding after something flat": Function(lambda x, c: F.pad(torch.cat([c(x).flatten(1)], 1), (0, 2))),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_op_is_refused(name):
    with pytest.raises(UnsupportedOp):
        written(UNSUPPORTED[name], torch.randn(2, 4, 9, 8))


def test_module_with_hook_is_refused():
    conv = nn.Conv2d(4, 4, 3)
    conv.register_forward_hook(lambda module, inputs, output: output * 2)
    with pytest.raises(UnsupportedOp, match="hooks"):
        written(nn.Sequential(conv), torch.randn(2, 4, 9, 8))


@pytest.mark.parametrize(
    "name", ["cropping", "in place and read again", "a dropout called with a keyword", "a padding of something flat"]
)
def test_unsupported_op_goes_through_the_exporter(name):
    check_backend(get("onnxruntime"), cases={name: (UNSUPPORTED[name], (torch.randn(2, 4, 9, 8),))})


@pytest.mark.parametrize("target", ["onnxruntime", pytest.param("openvino", marks=needs("openvino"))])
def test_convolutions_in_one_and_three_dimensions(target):
    cases = {
        "1-D": (nn.Sequential(nn.Conv1d(4, 6, 3, padding=1), nn.BatchNorm1d(6), nn.ReLU()), (torch.randn(2, 4, 20),)),
        "3-D": (nn.Sequential(nn.Conv3d(4, 6, 3, padding=1), nn.ReLU6()), (torch.randn(1, 4, 6, 5, 7),)),
    }
    check_backend(get(target), cases=cases)


def test_writer_and_exporter_use_the_same_operations():
    module = nn.Sequential(
        nn.Conv2d(4, 6, 3), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2)
    ).eval()
    sample = (torch.randn(1, 4, 8, 8),)
    ours = {node.op_type for node in written(module, *sample).graph.node}
    theirs = {node.op_type for node in export_with_pytorch(module, sample).graph.node}
    assert {"Conv", "Clip", "ReduceMean", "Gemm"} <= ours & theirs


def test_dtype_that_the_runtime_does_not_support_is_a_backend_error(tmp_path):
    """A file keeps the precision of its network, but compile() converts the network to float32."""
    module, sample = nn.Sequential(nn.Conv2d(4, 4, 3)).bfloat16(), torch.randn(1, 4, 8, 8).bfloat16()
    backend = get("onnxruntime")
    path = backend.export(module, (sample,), tmp_path / "model.onnx")
    with pytest.raises(BackendError, match=r"ONNX Runtime rejects this module: .*bfloat16"):
        backend.open(path, (sample,))
    backend.compile(module, (sample,)).close()


def test_model_larger_than_2_gib_is_refused():
    class Huge(nn.Conv2d):
        def parameters(self, recurse=True):
            yield torch.empty(2**30, device="meta")

    with pytest.raises(BackendError, match=r"The weights take 4\.0 GiB, and an ONNX model must be smaller than 2 GiB"):
        onnx_bytes(Huge(4, 4, 3), (torch.randn(1, 4, 8, 8),))


def in_batches(data, sample, batches=(1, 5)):
    """Yield inputs with several batch sizes, and the outputs of ONNX Runtime for them."""
    session = onnxruntime.InferenceSession(data)
    for batch in batches:
        given = torch.randn(batch, *sample.shape[1:])
        yield given, session.run(None, {session.get_inputs()[0].name: given.numpy()})


@pytest.mark.parametrize("name", SUPPORTED)
def test_supported_op_accepts_any_batch_size(name):
    module, sample = randomise_statistics(SUPPORTED[name]).eval(), torch.randn(2, 4, 9, 8)
    data = onnx_bytes(module, (sample,), dynamic_batch=True)
    model = onnx.load_from_string(data)
    onnx.checker.check_model(model, full_check=True)
    infos = [*model.graph.input, *model.graph.output]
    assert {info.type.tensor_type.shape.dim[0].dim_param for info in infos} == {"batch"}
    for given, found in in_batches(data, sample):
        with torch.no_grad():
            wanted = flatten(module(given.clone()))
        for one, two in zip(found, wanted, strict=True):
            torch.testing.assert_close(torch.from_numpy(one), two, rtol=1e-4, atol=1e-5)


def test_size_computed_from_the_batch_goes_through_the_exporter():
    module, sample = Function(lambda x, c: torch.cat([c(x), x], dim=0)).eval(), torch.randn(2, 4, 9, 8)
    with torch.no_grad():
        outputs, larger = module(sample), module(torch.randn(3, 4, 9, 8))
    write_model(module, (sample,), (outputs,))
    with pytest.raises(UnsupportedOp, match="a size that is computed from the batch"):
        write_model(module, (sample,), (outputs,), (larger,))
    for given, (found,) in in_batches(onnx_bytes(module, (sample,), dynamic_batch=True), sample):
        torch.testing.assert_close(torch.from_numpy(found), module(given).detach(), rtol=1e-4, atol=1e-5)


def test_module_with_a_fixed_batch_is_refused():
    module = Function(lambda x, c: c(x).reshape(2, 4, 72)).eval()
    with pytest.raises(BackendError, match="PyTorch cannot run this module with a batch of 3: shape"):
        onnx_bytes(module, (torch.randn(2, 4, 9, 8),), dynamic_batch=True)


@pytest.mark.parametrize("linked", [True, False], ids=["as its cause", "as its context"])
def test_interruption_inside_an_import_of_the_exporter_is_not_an_error_of_the_module(monkeypatch, linked):
    """PyTorch's modules, imported on first use, fail with an AttributeError if Ctrl-C interrupts their import."""

    def interrupted(*_, **__):
        try:
            try:
                raise KeyboardInterrupt
            finally:
                raise AttributeError("partially initialized module")
        except AttributeError as error:
            found = error
        if linked:
            raise torch.onnx.OnnxExporterError("Failed to export the model") from found
        raise found

    monkeypatch.setattr(torch.onnx, "export", interrupted)
    with pytest.raises(KeyboardInterrupt), backend_errors("It cannot be built"):
        export_with_pytorch(nn.Conv2d(3, 3, 1), (torch.zeros(1, 3, 4, 4),))


def test_interruption_that_was_handled_before_hides_no_error():
    def run():
        raise ValueError("too narrow")

    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with (
            pytest.raises(BackendError, match=r"^It cannot be built: too narrow$"),
            backend_errors("It cannot be built"),
        ):
            run()
        with pytest.raises(BackendError, match="PyTorch cannot export this module to ONNX"):
            export_with_pytorch(nn.Conv2d(3, 3, 1), (torch.zeros(1, 7, 4, 4),))


@pytest.mark.parametrize(
    ("returned", "names"),
    [
        (lambda x, conv: {"x": conv(x), "conv": (conv(x).mean(1), None), "same": x}, ["x_", "conv.0", "same"]),
        (lambda x, conv: {"b": conv(x), "a": {"deep": conv(x) + 1}}, ["b", "a.deep"]),
        (lambda x, conv: Heads(conv(x), conv(x) + 1), ["x_", "depth"]),
        (lambda x, conv: {0: conv(x), 1: conv(x) + 1}, ["0", "1"]),
        (lambda x, conv: {"a.0": conv(x), "a": (conv(x) + 1, x), "": x + 2}, ["a.0", "a.0_", "a.1", "output"]),
        (lambda x, conv: (conv(x), F.relu(conv(x))), ["output_0", "output_1"]),
        (lambda x, conv: conv(x), ["output_0"]),
    ],
    ids=["dict", "nested dict", "named tuple", "numbers", "clash", "tuple", "tensor"],
)
def test_outputs_have_the_names_that_the_forward_gives_them(returned, names):
    module, sample = Function(returned).eval(), torch.randn(2, 4, 9, 8)
    data = onnx_bytes(module, (sample,), dynamic_batch=True)
    assert [output.name for output in onnxruntime.InferenceSession(data).get_outputs()] == names
    onnx.checker.check_model(onnx.load_from_string(data), full_check=True)
    for given, found in in_batches(data, sample):
        with torch.no_grad():
            wanted = flatten(module(given))
        assert all(torch.allclose(torch.from_numpy(a), b, atol=1e-5) for a, b in zip(found, wanted, strict=True))
