"""The return values of a forward: tensors in tuples and dicts, and other values beside them."""

import onnx
import pytest
import torch
from torch import nn

from depthfold.backends import get
from depthfold.errors import BackendError
from lacking import needs

X = torch.randn(1, 3, 8, 8)


class Returns(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.conv, self.what = nn.Conv2d(3, 4, 1), what

    def forward(self, x):
        return self.what(self.conv(x))


OUTPUTS = {
    "with None": (lambda y: (y, None), 1),
    "with an empty list": (lambda y: (y, []), 1),
    "with a number": (lambda y: {"out": y, "stride": 4}, 1),
    "with text": (lambda y: [y, ("name", {"more": y * 2})], 2),
    "nested": (lambda y: {"out": y, "more": [y * 2, None]}, 2),
}


@pytest.mark.parametrize("target", ["pytorch", "onnxruntime", pytest.param("openvino", marks=needs("openvino"))])
@pytest.mark.parametrize("name", OUTPUTS)
def test_tensors_are_found_in_nested_outputs(name, target):
    what, tensors = OUTPUTS[name]
    module = Returns(what)
    found = get(target).compile(module, (X,))()
    assert len(found) == tensors
    for n, tensor in enumerate(found):
        torch.testing.assert_close(tensor, (n + 1) * module.conv(X).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda y: None, "The forward must return at least one tensor, found None"),
        (lambda y: (y, object()), "The forward must return tensors, or tuples or dicts of tensors, found object"),
    ],
)
@pytest.mark.parametrize("target", ["pytorch", "onnxruntime", "cost_model"])
def test_output_without_tensors_is_a_backend_error(what, message, target):
    with pytest.raises(BackendError, match=message):
        get(target).compile(Returns(what), (X,))()


@pytest.mark.parametrize("target", ["pytorch", "cost_model"])
def test_numbers_and_text_in_the_output_are_ignored(target):
    (found,) = get(target).compile(Returns(lambda y: {"out": y, "classes": 4, "name": "x"}), (X,))()
    assert found.shape == (1, 4, 8, 8)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, image, scale):
        return {"stride": 4, "out": self.conv(image) * scale, "classes": None}


@pytest.mark.parametrize("dynamic", [False, True])
def test_file_of_a_module_that_returns_a_number_has_its_inputs(dynamic, tmp_path):
    module, inputs = TwoInputs().eval(), (torch.randn(2, 3, 8, 8), torch.rand(1))
    backend = get("onnxruntime")
    path = backend.export(module, inputs, tmp_path / "m.onnx", dynamic_batch=dynamic)
    graph = onnx.load(path).graph
    assert [value.name for value in graph.input] == ["image", "scale"]
    given = (torch.randn(5 if dynamic else 2, 3, 8, 8), inputs[1])
    (found,) = backend.open(path, given)()
    torch.testing.assert_close(found, module(*given)["out"].detach(), rtol=1e-4, atol=1e-5)
