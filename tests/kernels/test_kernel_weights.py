"""The cast of all weights at once. None of this needs Triton."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from depthfold.kernels.weights import _laid_out_like, cast, count, prepare

X = torch.zeros(1, dtype=torch.bfloat16)


class Recorder(TorchDispatchMode):
    """Records the operations that PyTorch runs."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__)
        return function(*args, **kwargs or {})


def test_all_weights_are_copied_at_once_in_both_directions():
    weights = [torch.randn(4, 3, 3, 3, requires_grad=True), torch.randn(5, requires_grad=True)]
    with Recorder() as recorder:
        copies = cast(X, *weights)
        torch.autograd.backward(copies, [torch.ones_like(each) for each in copies])
    assert [name for name in recorder.names if "copy" in name] == ["_foreach_copy_.default"] * 2


def test_weights_are_cast_and_gradients_arrive_in_float32():
    weights = [torch.randn(4, 3, 3, 3, requires_grad=True), torch.randn(5, requires_grad=True)]
    copies = cast(X, *weights)
    assert [each.dtype for each in copies] == [torch.bfloat16] * 2
    for found, weight in zip(copies, weights, strict=True):
        assert torch.equal(found, weight.to(torch.bfloat16))
    gradients = [torch.randn_like(each) for each in copies]
    torch.autograd.backward(copies, gradients)
    for weight, gradient in zip(weights, gradients, strict=True):
        assert weight.grad.dtype == torch.float32
        assert torch.equal(weight.grad, gradient.float())


@pytest.mark.parametrize("of_weight", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("of_gradient", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(4, 3, 3, 3), (4, 8, 1, 1), (4, 1, 3, 3)])
def test_gradients_get_the_strides_of_their_weights(shape, of_gradient, of_weight):
    weight = torch.randn(shape).contiguous(memory_format=of_weight).requires_grad_()
    gradient = torch.randn(shape).to(torch.bfloat16).contiguous(memory_format=of_gradient)
    same = _laid_out_like(weight, gradient)
    assert same.stride() == weight.stride()
    assert torch.equal(same, gradient)
    assert (same.data_ptr() == gradient.data_ptr()) == (of_weight == of_gradient or 1 in shape[1:])
    (found,) = cast(X, weight)
    assert found.stride() == weight.stride()
    found.backward(gradient)
    assert weight.grad.stride() == weight.stride()
    assert torch.equal(weight.grad, gradient.float())


def test_weight_that_is_not_used_gets_no_gradient():
    weights = [torch.randn(3, requires_grad=True) for _ in range(2)]
    cast(X, *weights)[1].sum().backward()
    assert weights[0].grad is None
    assert torch.equal(weights[1].grad, torch.ones(3))


def test_frozen_weight_has_a_copy_without_gradient():
    frozen, weight = torch.randn(3), torch.randn(3, requires_grad=True)
    copies = cast(X, frozen, weight)
    assert [each.requires_grad for each in copies] == [False, True]
    copies[1].sum().backward()
    assert torch.equal(weight.grad, torch.ones(3))


def test_gradients_accumulate():
    weight = torch.randn(3, requires_grad=True)
    for _ in range(2):
        (found,) = cast(X, weight)
        (found + found).sum().backward()
    assert torch.equal(weight.grad, torch.full((3,), 4.0))


def test_weights_in_the_precision_of_the_input_are_not_copied():
    weight = torch.randn(3, requires_grad=True)
    assert cast(torch.zeros(1), weight)[0] is weight
    assert cast(torch.zeros(1, dtype=torch.long), weight)[0] is weight
    assert cast(None, weight)[0] is weight


def test_input_is_prepared():
    x = torch.randn(2, 3, 4, 5)
    assert prepare(x).is_contiguous(memory_format=torch.channels_last)
    assert prepare(x).dtype == torch.float32
    assert prepare(x, torch.bfloat16).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert prepare(x).dtype == torch.bfloat16
        assert prepare(torch.arange(3)).dtype == torch.long
    assert prepare("text") == "text"
    assert prepare(torch.randn(3)).shape == (3,)


def test_batches_are_counted():
    batches = [torch.tensor(3), torch.tensor(0)]
    count(*batches)
    assert batches == [torch.tensor(4), torch.tensor(1)]
