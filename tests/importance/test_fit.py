"""Method "fit", compared with numpy's least squares on an explicit design matrix in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import depthfold as df
from depthfold.core import ConvShape, Drops, FlaggedSpan, Span
from depthfold.importance import IncompleteTable, fit, importance_plan, importance_student, measure_importance
from depthfold.importance.fit import NormalEquations, fit_block, too_large
from depthfold.training import FunctionTask, Recipe, recalibrate
from tiny_importance import RECIPE, SIZE, Tiny, TinyTask, batch, holdout_score, tiny_network

FIT = Recipe(steps=3, batch=4, seed=5)
NETWORK = tiny_network()


def loss(model, step):
    x, y = batch(step.seed, step.number)
    return F.cross_entropy(model(x.double())[:, :3], y)


TASK = FunctionTask(loss=loss, score=TinyTask().score)
BATCHES = [batch(5, number)[0].double() for number in range(FIT.steps)]


def design(x, kernel, stride, padding, dilation):
    """Return the matrix with a row for each output of a convolution and a column for each weight, by plain loops."""
    before, after = zip(*padding, strict=True)
    x = np.pad(x, ((0, 0), (0, 0), *zip(before, after, strict=True)))
    extent = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    sizes = [(n - e) // s + 1 for n, e, s in zip(x.shape[2:], extent, stride, strict=True)]
    rows = []
    for image in x:
        for place in itertools.product(*map(range, sizes)):
            corner = [p * s for p, s in zip(place, stride, strict=True)]
            window = tuple(slice(c, c + e, d) for c, e, d in zip(corner, extent, dilation, strict=True))
            rows.append(image[(slice(None), *window)].reshape(-1))
    return np.array(rows)


def least_squares(x, target, shape):
    """Return weight and bias that minimise the squared error plus a penalty on the weights, group by group."""
    weights, biases = [], []
    inputs = np.split(x, shape.groups, axis=1)
    outputs = np.split(target, shape.groups, axis=1)
    for own, wanted in zip(inputs, outputs, strict=True):
        U = design(own, shape.kernel, shape.stride, shape.padding, shape.dilation)
        t = np.moveaxis(wanted, 1, -1).reshape(-1, wanted.shape[1])
        penalty = 1e-3 * ((U - U.mean(0)) ** 2).sum(0).mean()
        width = U.shape[1]
        A = np.block([[U, np.ones((len(U), 1))], [np.sqrt(penalty) * np.eye(width), np.zeros((width, 1))]])
        solution = np.linalg.lstsq(A, np.concatenate([t, np.zeros((width, t.shape[1]))]), rcond=None)[0]
        weights.append(solution[:-1].T.reshape(-1, own.shape[1], *shape.kernel))
        biases.append(solution[-1])
    return np.concatenate(weights), np.concatenate(biases)


SHAPES = {
    "dense": dict(in_channels=3, out_channels=4, kernel=(3, 3), stride=(1, 1), padding=((1, 1), (1, 1))),
    "strided": dict(in_channels=2, out_channels=3, kernel=(3, 5), stride=(2, 1), padding=((1, 0), (2, 3))),
    "dilated": dict(in_channels=2, out_channels=3, kernel=(2, 3), stride=(1, 2), padding=((1, 1), (0, 2))),
    "depthwise": dict(in_channels=4, out_channels=4, kernel=(3, 3), stride=(1, 1), padding=((1, 1), (1, 1)), groups=4),
    "grouped": dict(in_channels=4, out_channels=6, kernel=(1, 3), stride=(1, 1), padding=((0, 0), (1, 1)), groups=2),
    "1-D": dict(in_channels=3, out_channels=2, kernel=(4,), stride=(2,), padding=((1, 2),)),
    "3-D": dict(in_channels=2, out_channels=2, kernel=(2, 1, 2), stride=(1, 1, 2), padding=((1, 0), (0, 0), (0, 1))),
}


@pytest.mark.parametrize("name", SHAPES)
def test_equations_equal_least_squares(name, monkeypatch):
    fields = {"dilation": (2, 1) if name == "dilated" else (1,) * len(SHAPES[name]["kernel"])} | SHAPES[name]
    shape = ConvShape(**fields)
    generator = torch.Generator().manual_seed(0)
    size = (9, 8, 5)[: shape.dims]
    batches = [
        (
            torch.randn(6, shape.in_channels, *size, generator=generator, dtype=torch.float64) + 2,
            torch.randn(6, shape.out_channels, *shape.out_size(size), generator=generator, dtype=torch.float64) - 1,
        )
        for _ in range(3)
    ]
    monkeypatch.setattr(fit, "WINDOWS", 1000)  # few images at once
    equations = NormalEquations(shape, torch.device("cpu"))
    for x, target in batches:
        equations.add(x, target)
    kernel = equations.solve()
    x, target = (torch.cat(each).numpy() for each in zip(*batches, strict=True))
    weight, bias = least_squares(x, target, shape)
    np.testing.assert_allclose(kernel.weight, weight, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(kernel.bias, bias, rtol=1e-8, atol=1e-10)


NET = Tiny().double().eval()
TRACED = df.trace(Tiny().double(), torch.zeros(1, 2, SIZE, SIZE, dtype=torch.float64))


@torch.no_grad()
def maps():
    """Return what some merged convolutions of Tiny read and what they must compute, for all batches together.

    A key may end with dropped layers, which change only the shape of the convolution.
    """
    net, x = NET, torch.cat(BATCHES)
    one = F.relu(net.norm1(net.conv1(x)))
    two = F.relu(net.norm2(net.conv2(one)))
    branch = net.norm3(net.conv3(two))
    three = branch + one
    four = net.norm4(net.conv4(three))
    five = net.norm5(net.conv5(F.relu(four)))
    return {
        (0, 3, 1, 1): (x, three),
        (0, 4, 1, 1): (x, four),
        (1, 3, 1, 0): (one, three),  # the residual is inside: it is a part of the kernel
        (2, 3, 1, 1): (two, branch),  # it begins before the block, and is added afterwards
        (3, 5, 1, 1): (F.relu(three), five),  # an activation is inserted at 3
        (0, 3, 1, 1, 3): (x, three),
        (0, 3, 1, 1, 2, 3): (x, three),
        (1, 3, 1, 0, 2): (one, three),  # the first layer of the block is dropped
        (3, 5, 1, 1, 5): (F.relu(three), five),
    }


@pytest.mark.parametrize("key", maps())
@torch.no_grad()
def test_block_of_a_network_is_fitted(key):
    block, dropped = FlaggedSpan(*key[:2], *map(bool, key[2:4])), Drops(key[4:])
    student = importance_student(TRACED, block, 0, dropped=dropped, reinit=False)
    fit_block(TRACED, student, block, TASK, FIT, seed=5)
    x, target = maps()[key]
    shape = TRACED.network.merged_shape(block.span, dropped)
    weight, bias = least_squares(x.numpy(), target.numpy(), shape)
    merged = student.get_submodule(f"conv{dropped.kept(block.span)[0]}")
    assert merged.kernel_size == shape.kernel
    np.testing.assert_allclose(merged.weight, weight, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(merged.bias, bias, rtol=1e-8, atol=1e-10)
    # The layers of the block are gone; the batch norms outside stay.
    names = {name for name, _ in student.named_modules()}
    assert {name for name in names if name.startswith("norm")} == {
        f"norm{l}" for l in range(1, 6) if not block.i < l <= block.j
    }
    torch.testing.assert_close(student.eval()(BATCHES[0]), by_hand(block, merged, BATCHES[0]), rtol=1e-9, atol=1e-9)


def by_hand(block, merged, x):
    """Return the output of Tiny with the convolution in place of the block."""
    net, activations = NET, importance_plan(TRACED.network, block).activations
    at = [x]
    while len(at) <= 5:
        l = len(at)
        inside = block.i < l <= block.j
        if inside and l < block.j:
            at.append(None)
            continue
        conv, norm = getattr(net, f"conv{l}"), getattr(net, f"norm{l}")
        y = merged(at[block.i]) if inside else norm(conv(at[-1]))
        if l == 3 and not (inside and block.i <= 1):
            y = y + at[1]
        at.append(F.relu(y) if l in activations else y)
    return net.head(at[5].mean((2, 3)))


@torch.no_grad()
def test_nothing_is_fitted_for_a_dropped_branch():
    block, branch = FlaggedSpan(1, 3, True, True), Drops(branches=[Span(1, 3)])
    student = importance_student(TRACED, block, 0, dropped=branch, reinit=False)
    fit_block(TRACED, student, block, TASK, FIT, seed=5)
    wanted = by_hand(block, nn.Identity(), BATCHES[0])
    torch.testing.assert_close(student.eval()(BATCHES[0]), wanted, rtol=1e-9, atol=1e-9)


class Functional(nn.Module):
    """Everything is called as a function, and the layers have different numbers of channels."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.norm1 = nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.conv2, self.norm2 = nn.Conv2d(6, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        for conv, norm in ((self.conv1, self.norm1), (self.conv2, self.norm2)):
            x = F.conv2d(x, conv.weight, conv.bias, 1, 1)
            mean, variance = norm.running_mean, norm.running_var
            x = F.relu(F.batch_norm(x, mean, variance, norm.weight, norm.bias, self.training, 0.1, norm.eps))
        return self.head(x.mean((2, 3)))


def test_nothing_of_the_old_layers_stays():
    traced = df.trace(Functional().train(), torch.zeros(1, 2, SIZE, SIZE))
    block = FlaggedSpan(0, 2, True, True)
    student = importance_student(traced, block, 0, reinit=False)
    fit_block(traced, student, block, TinyTask(), RECIPE, seed=5)
    called = [str(node.target) for node in student.graph.nodes if node.op in ("call_module", "get_attr")]
    assert called == ["conv1", "head"]
    assert len(measure_importance(traced, TinyTask(), RECIPE, method="fit").importances) == 3


def test_blocks_that_change_nothing_are_only_recalibrated():
    table = measure_importance(NETWORK, TinyTask(), RECIPE, method="fit")
    unchanged = df.rewrite(NETWORK, NETWORK.vanilla)
    recalibrate(unchanged, TinyTask(), RECIPE, steps=range(3, 7), seed=5)
    same = [e for e in table.entries if importance_plan(NETWORK.network, e.span) == NETWORK.vanilla]
    assert len(same) == 5 and {e.samples for e in same} == {(holdout_score(unchanged.eval()),)}


def test_dead_inputs_give_a_finite_kernel():
    shape = ConvShape(**SHAPES["dense"], dilation=(1, 1))
    equations = NormalEquations(shape, torch.device("cpu"))
    equations.add(torch.zeros(2, 3, 5, 5), torch.ones(2, 4, 5, 5))
    kernel = equations.solve()
    assert torch.equal(kernel.weight, torch.zeros_like(kernel.weight)) and torch.allclose(
        kernel.bias, torch.ones(4).double()
    )


def test_depthwise_layers_stay_depthwise():
    model = nn.Sequential(
        nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.BatchNorm2d(4), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip
    traced = df.trace(model, torch.zeros(1, 2, SIZE, SIZE))
    block = FlaggedSpan(1, 3, True, True)
    student = importance_student(traced, block, 0, reinit=False)
    fit_block(traced, student, block, TinyTask(), RECIPE, seed=5)
    merged = student.get_submodule("3")
    assert (merged.groups, merged.kernel_size, merged.padding) == (4, (5, 5), (2, 2))
    assert len(measure_importance(traced, TinyTask(), RECIPE, method="fit").importances) == len(traced.flagged_spans())


def test_convolutions_that_are_too_large_get_a_reason(monkeypatch):
    wide = dict(SHAPES["dense"], in_channels=576, kernel=(5, 5), dilation=(1, 1))
    why = "its merged convolution has 14400 weights per output, and the method 'fit' solves for at most 8192"
    assert too_large(ConvShape(**wide)) == why
    assert too_large(ConvShape(**wide | dict(kernel=(3, 3)))) is None
    assert too_large(ConvShape(**wide | dict(out_channels=576, groups=576))) is None

    monkeypatch.setattr(fit, "LARGEST", 100**2)  # (0, 4] has 2 * 81 weights per output, (1, 3] has 4 * 25
    with pytest.warns(IncompleteTable) as caught:
        table = measure_importance(NETWORK, TinyTask(), RECIPE, method="fit")
    reasons = {entry.span: entry.reason for entry in table.entries if entry.reason}
    assert {(span.i, span.j) for span in reasons} == {(0, 4), (0, 5), (1, 4), (1, 5)}
    (warning,) = caught
    lines = str(warning.message).splitlines()
    assert lines[0] == "5 blocks of 18 are too large for this method; no plan will use them:"
    assert lines[1] == (
        "  (0, 4], flags 11: not measured: its merged convolution has 162 weights per output, and the method 'fit' "
        "solves for at most 100"
    )
    assert len(lines) == 6
    assert warning.filename == __file__


def test_single_layers_that_are_too_large_need_no_fit_if_they_change_nothing():
    model = nn.Sequential(
        nn.Conv2d(2, 1024, 1), nn.ReLU(), nn.Conv2d(1024, 8, 3, padding=1), nn.Conv2d(8, 3, 1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip
    traced = df.trace(model, torch.zeros(1, 2, SIZE, SIZE))
    with pytest.warns(IncompleteTable, match=r"too large for this method"):
        table = measure_importance(traced, TinyTask(), RECIPE.replace(steps=1), method="fit")
    found = {entry.span: entry for entry in table.entries}
    assert len(table.entries) == len(traced.flagged_spans())
    # The second layer has 9,216 weights per output. Without an activation after it, it is the original layer.
    assert found[FlaggedSpan(1, 2, True, False)].samples == (table.base,)
    assert "9216 weights per output" in found[FlaggedSpan(1, 2, True, True)].reason
