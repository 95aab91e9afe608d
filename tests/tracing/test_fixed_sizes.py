"""Padding that depends on the map size is exact at the traced size, and other padding is refused."""

import itertools
import math
import pickle
from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import depthfold as df
from depthfold.core import Drops
from depthfold.core.shape import SizeRule
from depthfold.errors import InputSizeError
from depthfold.testing import random_plan
from nets import Net, agree, conv, folds_exactly, image


def same(size, kernel, stride, dilation):
    """Return the padding of TensorFlow's SAME: the output has ceil(size / stride) values."""
    total = max((math.ceil(size / stride) - 1) * stride + (kernel - 1) * dilation + 1 - size, 0)
    return total // 2, total - total // 2


class Same(nn.Conv2d):
    """A convolution ported from TensorFlow."""

    def forward(self, x):
        h, w = x.shape[-2:]
        top, bottom = same(h, self.kernel_size[0], self.stride[0], self.dilation[0])
        left, right = same(w, self.kernel_size[1], self.stride[1], self.dilation[1])
        if top + bottom + left + right > 0:
            x = F.pad(x, (left, right, top, bottom))
        return F.conv2d(x, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


def run(traced, x):
    with torch.no_grad():
        return traced(x)


@pytest.mark.parametrize(
    ("kernel", "stride", "dilation"),
    [(3, 2, 1), (5, 2, 1), (2, 2, 1), (1, 2, 1), (3, 1, 1), (3, 3, 1), (5, 4, 1), (3, 2, 2)],
)
@pytest.mark.parametrize("size", [12, 13])
def test_sizes_with_the_same_padding_run_and_others_are_refused(kernel, stride, dilation, size):
    layer = Same(4, 4, kernel, stride=stride, dilation=dilation)
    model = nn.Sequential(conv(), nn.ReLU(), layer, nn.ReLU(), conv()).double().eval()
    traced = df.trace(model, torch.randn(1, 4, size, size).double())
    assert [entry.where for entry in traced.network.layers] == ["0", "2", "4"]
    assert traced.network.layers[1].shape.padding == (same(size, kernel, stride, dilation),) * 2
    whole = df.rewrite(traced, df.Plan((), ()))
    networks = [df.rewrite(traced, traced.vanilla), whole]
    networks += [df.merge(student) for student in networks]
    for other in range(size - 4, size + 9):
        x = torch.randn(1, 4, other, size).double()
        if same(other, kernel, stride, dilation) == same(size, kernel, stride, dilation):
            agree(run(networks[0].eval(), x), run(model, x))
            agree(run(networks[2], x), run(model, x))
            agree(run(networks[3], x), run(whole.eval(), x))
            continue
        for made in networks[:2]:
            with pytest.raises(InputSizeError, match="The padding of 2 depends on the size of the input"):
                made(x)
        for made in networks[2:]:
            with pytest.raises(AssertionError, match="The padding of 2 depends on the size of the input"):
                made(x)


def test_guard_inside_a_segment_is_checked_at_its_front():
    model = nn.Sequential(
        nn.Conv2d(4, 4, 3, stride=2, padding=1), nn.ReLU(), Same(4, 4, 5, stride=2), nn.ReLU(), Same(4, 4, 3, stride=2)
    )
    model = model.double().eval()
    traced = df.trace(model, torch.randn(1, 4, 24, 24).double())
    student = df.rewrite(traced, df.Plan((), ())).eval()
    merged = df.merge(student)
    ran = []
    for size in range(16, 50):
        after = (size + 1) // 2
        later = math.ceil(after / 2)
        fits = same(after, 5, 2, 1) == same(12, 5, 2, 1) and same(later, 3, 2, 1) == same(6, 3, 2, 1)
        x = torch.randn(1, 4, 24, size).double()
        try:
            found = run(student, x)
            agree(run(merged, x), found)
            assert found.shape == run(model, x).shape
            ran.append(size)
        except InputSizeError:
            with pytest.raises(AssertionError):
                merged(x)
        assert (size in ran) == fits


def test_printed_network_shows_fixed_padding():
    model = nn.Sequential(Same(4, 4, 3, stride=2), Same(4, 4, 3, stride=3), Same(4, 4, 3))
    text = str(df.trace(model, torch.randn(1, 4, 12, 15)))
    assert "Padding that depends on the size of the map, fixed at the traced size:" in text
    assert "0 (traced at 12x15; allowed sizes: even, 2 to 4096 x odd, 1 to 4095)" in text
    assert "1 (traced at 6x8; allowed sizes: 0 modulo 3, 3 to 4095 x 2 modulo 3, 2 to 4094)" in text
    assert "2 (traced at 2x3; allowed sizes: 1 to 4096 x 1 to 4096)" in text


@pytest.mark.slow
def test_random_plans_with_residuals():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = Same(4, 8, 1), Same(8, 8, 5, groups=8), Same(8, 4, 1)

        def forward(self, x):
            return x + self.c(F.relu6(self.b(F.relu6(self.a(x)))))

    model = nn.Sequential(Same(4, 4, 3, stride=2), nn.ReLU(), Block(), Same(4, 4, 5, stride=2), Block(), Block())
    model = model.double().eval()
    x = torch.randn(1, 4, 16, 18).double()
    traced = df.trace(model, x)
    assert (traced.depth, len(traced.network.skips)) == (11, 3)
    agree(run(df.merge(df.rewrite(traced, traced.vanilla)), x), run(model, x))
    rng = Random(0)
    for space, drops in itertools.product(("paper", "full"), (0, 0, 0, 0.5, 0.9)):
        student = df.rewrite(traced, random_plan(traced.network, rng, space, drops=drops)).eval()
        merged = pickle.loads(pickle.dumps(df.merge(student)))
        for shape in ((16, 18), (32, 34), (20, 22)):
            y = torch.randn(1, 4, *shape).double()
            agree(run(merged, y), run(student, y))


class Resizing(nn.Module):
    """A block that would resize its skip if that had another size than its branch."""

    def __init__(self):
        super().__init__()
        self.a, self.b = conv(), conv()

    def forward(self, x):
        y = self.b(F.relu(self.a(x)))
        return F.relu(y + (x if y.shape[2:] == x.shape[2:] else F.interpolate(x, size=y.shape[2:])))


def test_skip_that_starts_at_a_guard_is_cropped():
    model = nn.Sequential(conv(), nn.ReLU(), nn.Sequential(Resizing(), Resizing()), conv())
    traced = folds_exactly(model, image())
    assert (len(traced.network.fixed_padding), len(traced.network.skips)) == (2, 2)
    for seed in range(8):
        student = df.rewrite(traced, random_plan(traced.network, Random(seed), drops=0.5)).eval()
        agree(run(df.merge(student), image(15).double()), run(student, image(15).double()))


def test_guard_of_several_layers_stays_if_the_first_is_dropped():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = conv(), conv(padding=0, stride=2)

        def forward(self, x):
            odd = 1 if x.shape[-1] % 2 else 0
            return self.b(F.pad(F.relu(self.a(x)), (odd, 1, 1, 1)))

    traced = df.trace(nn.Sequential(conv(), nn.ReLU(), Pair()).double().eval(), image(11).double())
    for plan in (df.Plan((), (), Drops(layers=[2])), df.Plan({1, 2}, {1, 2}, Drops(layers=[2]))):
        student = df.rewrite(traced, plan).eval()
        merged = df.merge(student)
        agree(run(merged, image(13).double()), run(student, image(13).double()))
        for made, error in ((student, InputSizeError), (merged, AssertionError)):
            with pytest.raises(error, match="The padding of 2 depends on the size of the input"):
                made(image(12).double())


class Late(nn.Module):
    """The size of its input decides on the padding of a layer after what reads the input first."""

    def __init__(self, residual):
        super().__init__()
        self.a, self.b, self.c, self.residual = conv(), conv(), conv(padding=0, stride=2), residual

    def forward(self, x):
        odd = 1 if x.shape[-1] % 2 else 0
        y = self.b(F.relu(self.a(x)))
        x = F.relu(x + y) if self.residual else x
        return F.relu(self.c(F.pad(x, (odd, 1, odd, 1))))


@pytest.mark.parametrize(
    ("residual", "plan"),
    [(True, df.Plan({1, 3, 4}, {1, 3}, Drops(branches=[(1, 3)]))),
     (True, df.Plan({1, 4}, {1}, Drops(branches=[(1, 3)]))),
     (True, df.Plan({4}, (), Drops(branches=[(1, 3)]))),
     (False, df.Plan({1, 2}, {1}))],
)  # fmt: skip
def test_guard_stays_without_its_first_reader(residual, plan):
    """The branch that reads it first is dropped, or its value is not used."""
    model = nn.Sequential(conv(), nn.ReLU(), Late(residual)).double().eval()
    traced = df.trace(model, image(12).double())
    student = df.rewrite(traced, plan).eval()
    merged = df.merge(student)
    agree(run(merged, image(14).double()), run(student, image(14).double()))
    for made, error in ((student, InputSizeError), (merged, AssertionError)):
        with pytest.raises(error, match="The padding of 2 depends on the size of the input"):
            made(image(13).double())


def test_padding_without_a_period_is_allowed_only_at_the_traced_size():
    class Threshold(nn.Conv2d):
        def forward(self, x):
            pad = 2 if x.shape[2] > 40 else 1
            return F.conv2d(F.pad(x, (pad, pad, 1, 1)), self.weight, self.bias, self.stride)

    traced = df.trace(nn.Sequential(conv(), Threshold(4, 4, 3)), image())
    only = SizeRule(period=1, remainders=(0,), smallest=12, largest=12)
    assert [fixed.rules[0] for fixed in traced.network.fixed_padding] == [only]
    assert "12 x 1 to 4096" in str(traced)


@pytest.mark.parametrize(
    "scale", [lambda x: x.shape[2] / 12, lambda x: max(x.shape[0], 1)], ids=["size of the map", "batch"]
)
def test_module_is_opaque_if_more_than_its_padding_depends_on_the_size(scale):
    class Scaled(Same):
        def forward(self, x):
            return super().forward(x) * float(scale(x))

    model = nn.Sequential(conv(), Scaled(4, 4, 3, stride=2), conv()).double().eval()
    traced = df.trace(model, image().double())
    assert (traced.depth, traced.network.fixed_padding) == (2, ())
    assert {each.code for each in traced.network.refusals if each.where == "1"} == {"opaque"}
    agree(run(df.merge(df.rewrite(traced, traced.vanilla)), image(30).double()), run(model, image(30).double()))


def test_module_that_receives_several_sizes_is_opaque():
    shared = Same(4, 4, 3, stride=2)
    model = Net(lambda net, x: net.s(net.s(x)), s=shared)
    assert df.trace(model, image()).depth == 0


def test_exported_and_saved_networks_work_at_the_traced_size(tmp_path):
    model = nn.Sequential(Same(4, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), Same(8, 4, 3, stride=2)).eval()
    traced = df.trace(model, image(12, batch=1))
    merged = df.merge(df.rewrite(traced, df.Plan((), ())))
    assert "ONNX" in str(df.export(merged, tmp_path / "model.onnx"))
    df.save(merged, tmp_path / "saved")
    loaded = df.load(tmp_path / "saved", model)
    agree(run(loaded, image(12)), run(merged, image(12)), 1e-6)
    with pytest.raises(AssertionError, match="print\\(network\\)"):
        loaded(image(13))
