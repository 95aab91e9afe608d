"""The return values of a forward: tensors in tuples and dicts, and other values beside them."""

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
