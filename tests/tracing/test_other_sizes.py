"""Facts that hold only at the traced size are not assumed at other sizes."""

import math
import pickle
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import depthfold as df
from depthfold.errors import TraceError
from nets import Net, agree, conv, image


def run(traced, x):
    with torch.no_grad():
        return traced(x.clone())


def vanilla(model, x):
    traced = df.trace(model.double().eval(), x)
    merged = df.merge(df.rewrite(traced, traced.vanilla))
    agree(run(merged, x), run(model, x))
    return traced, merged


def maps(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).double()


def halved(condition):
    """A model with a convolution that halves its input if the condition on its size holds."""

    class Halved(nn.Conv2d):
        def forward(self, x):
            return F.conv2d(x / 2 if condition(x) else x, self.weight, self.bias, padding=1)

    return nn.Sequential(conv(), nn.ReLU(), Halved(4, 4, 3), nn.ReLU(), conv())


@pytest.mark.parametrize(
    ("condition", "other"),
    [
        (lambda x: x.shape[-1] * x.shape[-2] > 300 * 300, (1, 4, 320, 320)),
        (lambda x: x.shape[-1] * x.shape[-2] > 100 * 100, (1, 4, 101, 101)),
        (lambda x: min(x.shape[-2:]) < 7, (1, 4, 6, 6)),
        (lambda x: x.shape[0] > 4, (8, 4, 16, 16)),
    ],
    ids=["large", "medium", "small", "batch"],
)
def test_module_that_behaves_differently_at_another_size(condition, other):
    model = halved(condition)
    _, merged = vanilla(model, maps(1, 4, 16, 16))
    agree(run(merged, maps(*other)), run(model, maps(*other)))


def test_constants_computed_from_sizes():
    class Scaled(nn.Conv2d):
        def forward(self, x):
            return F.conv2d(x * torch.tensor(1.0 / max(x.shape[-1], 1)).double(), self.weight, self.bias, padding=1)

    model = nn.Sequential(conv(), Scaled(4, 4, 3))
    _, merged = vanilla(model, maps(1, 4, 16, 16))
    agree(run(merged, maps(1, 4, 24, 24)), run(model, maps(1, 4, 24, 24)))


@pytest.mark.parametrize(
    ("write", "other"),
    [
        (lambda y: y[:1].mul_(2), (2, 4, 16, 16)),
        (lambda y: y[..., :16].add_(1), (1, 4, 16, 20)),
        (lambda y: y[:, :, :16, :16].neg_(), (1, 4, 20, 20)),
        (lambda y: y.reshape(y.shape[0], 4, -1).add_(1), (2, 4, 8, 8)),
    ],
    ids=["batch", "columns", "both", "reshape"],
)
def test_slice_that_is_the_whole_value_at_the_traced_size(write, other):
    def forward(net, x):
        y = net.a(x)
        write(y)
        return net.b(y)

    model = Net(forward, a=conv(), b=conv())
    _, merged = vanilla(model, maps(1, 4, 16, 16))
    agree(run(merged, maps(*other)), run(model, maps(*other)))


class Same(nn.Conv2d):
    def forward(self, x):
        k, s = self.kernel_size[0], self.stride[0]
        total = [max((-(-n // s) - 1) * s + k - n, 0) for n in x.shape[-2:]]
        (top, left) = (t // 2 for t in total)
        x = F.pad(x, (left, total[1] - left, top, total[0] - top))
        return F.conv2d(x, self.weight, self.bias, self.stride)


class Projected(nn.Module):
    """A projection of two steps. The padding of the second one depends on the size of its map."""

    def __init__(self):
        super().__init__()
        self.main = nn.Conv2d(4, 4, 4, stride=4, padding=1)
        self.first, self.second = nn.Conv2d(4, 4, 1, stride=2), Same(4, 4, 2, stride=2)

    def forward(self, x):
        return self.main(x) + self.second(self.first(x))


def test_guard_of_a_later_step_is_checked_at_the_front():
    model = nn.Sequential(conv(4, 4, 1, bias=False), nn.ReLU(), Projected(), conv(4, 4, 1)).double().eval()
    traced = df.trace(model, maps(1, 4, 16, 16))
    merged = df.merge(df.rewrite(traced, df.Plan((), traced.network.barriers)))
    model[1] = nn.Identity()
    for size in (16, 20):
        agree(run(merged, maps(1, 4, size, size)), run(model, maps(1, 4, size, size)))
    for size in (18, 22):
        with pytest.raises(AssertionError, match="depends on the size"):
            merged(maps(1, 4, size, size))


def test_guard_shared_by_two_branches():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.p = nn.Parameter(torch.randn(4, 4, 3, 3)), nn.Parameter(torch.randn(4, 4, 1, 1))

        def forward(self, x):
            pad = max((-(-x.shape[2] // 2) - 1) * 2 + 3 - x.shape[2], 0)
            y = F.pad(x, (pad // 2, pad - pad // 2) * 2)
            return F.conv2d(y, self.w, stride=2) + F.conv2d(x, self.p, stride=2)

    traced, _ = vanilla(nn.Sequential(conv(), nn.ReLU(), Both(), nn.ReLU(), conv()), maps(1, 4, 16, 16))
    student = df.rewrite(traced, df.Plan((), traced.network.barriers)).eval()
    agree(run(df.merge(student), maps(1, 4, 16, 16)), run(student, maps(1, 4, 16, 16)))


def resized(size):
    """A model that resizes a map to a size that it computes from the map."""
    return Net(lambda net, x: F.interpolate(net.b(F.relu(net.a(x))), size=size(x)), a=conv(), b=conv())


SHAPES = {
    "loop": lambda x: [2 * n for n in x.shape[2:]],
    "list": lambda x: list(x.shape)[2:],
    "star": lambda x: (*x.size()[2:3], x.shape[3] + 1),
    "len": lambda x: x.shape[len(x.shape) - 2 :],
    "zip": lambda x: [n * scale for n, scale in zip(x.shape[2:], (1, 2), strict=True)],
}


@pytest.mark.parametrize("inside", [False, True], ids=["top level", "submodule"])
@pytest.mark.parametrize("size", SHAPES.values(), ids=SHAPES)
def test_iteration_over_a_shape_holds_for_every_size(size, inside):
    part = resized(size)
    model = nn.Sequential(conv(), part, conv()) if inside else part
    traced, merged = vanilla(model, maps(1, 4, 8, 8))
    assert traced.depth == (4 if inside else 2)
    agree(run(merged, maps(2, 4, 6, 10)), run(model, maps(2, 4, 6, 10)))


NUMBERS = {
    "int": lambda x: (int(x.shape[2]), int(x.size(3))),
    "quotient": lambda x: (int(x.shape[2] / 2), 4),
    "float": lambda x: (4, int(1.5 * float(x.shape[2]))),
    "ceil": lambda x: (4, range(8)[math.ceil(x.shape[2] / 3)]),
    "index": lambda x: (4, sum(2 for _ in range(x.shape[2]))),
}


@pytest.mark.parametrize("size", NUMBERS.values(), ids=NUMBERS)
def test_size_as_a_python_number_is_asserted(size):
    model = resized(size)
    _, merged = vanilla(model, maps(1, 4, 8, 8))
    agree(run(merged, maps(2, 4, 8, 8)), run(model, maps(2, 4, 8, 8)))
    with pytest.raises(AssertionError, match="depends on the size of a value"):
        merged(maps(1, 4, 10, 10))


def test_size_as_a_python_number_in_a_submodule_is_opaque():
    traced = df.trace(nn.Sequential(conv(), resized(NUMBERS["int"]), conv()), image())
    assert [refusal.code for refusal in traced.network.refusals if refusal.where == "1"] == ["opaque"]


@pytest.mark.parametrize("number", [int, float, range], ids=lambda each: each.__name__)
def test_data_as_a_python_number_is_refused(number):
    with pytest.raises(TraceError, match="cannot be traced"):
        df.trace(Net(lambda net, x: net.a(x) * (number(x[0, 0, 0, 0]) != 0), a=conv()), image())


@dataclass
class Result:
    logits: torch.Tensor


def test_outputs_in_a_dataclass_are_compared():
    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = conv(), conv()

        def forward(self, x):
            y = self.a(x)
            return Result(self.b(y * 2 if type(y) is torch.Tensor else y))

    with pytest.raises(TraceError, match="checks the type of a value"):
        df.trace(Wrong(), image())


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * torch.sigmoid(x)


@torch.jit.script
def doubled(x):
    return x * 2


@pytest.mark.parametrize(
    "run_part",
    [
        lambda net, x: Swish.apply(x),
        lambda net, x: checkpoint(net.c, x, use_reentrant=True),
        lambda net, x: checkpoint(net.c, x, use_reentrant=False),
        lambda net, x: doubled(x),
        lambda net, x: torch.as_tensor(x) * 2,
        lambda net, x: x * 2 if isinstance(x, torch.DoubleTensor) else x,
    ],
    ids=["autograd function", "checkpoint", "checkpoint, new", "script", "as_tensor", "old types"],
)
@pytest.mark.filterwarnings("ignore")
def test_functions_implemented_in_cpp_do_not_receive_proxies(run_part):
    vanilla(nn.Sequential(conv(), Net(run_part, c=conv()), conv()), maps(1, 4, 8, 8))


def test_tracing_in_inference_mode():
    with torch.inference_mode():
        assert df.trace(nn.Sequential(conv(), nn.ReLU(), conv()), image()).depth == 2


@pytest.mark.parametrize("how", ["assigned", "clamped"])
def test_forward_that_changes_its_weights_is_opaque(how):
    class Constrained(nn.Conv2d):
        def forward(self, x):
            if how == "assigned":
                self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.1)
            else:
                self.weight.data.clamp_(-0.01, 0.01)
            return F.conv2d(x, self.weight, self.bias, padding=1)

    traced, _ = vanilla(nn.Sequential(conv(), Constrained(4, 4, 3), conv()), maps(1, 4, 8, 8))
    assert [layer.where for layer in traced.network.layers] == ["0", "2"]
    message = {"assigned": "the forward replaces a parameter", "clamped": "its forward changes weight, which"}[how]
    with pytest.raises(TraceError, match=rf"{message}.*test_other_sizes.py:\d+, `self.weight.data"):
        df.trace(Constrained(4, 4, 3), maps(1, 4, 8, 8).float())


def test_forward_that_requires_a_target_in_training():
    class Norm(nn.BatchNorm2d):
        def forward(self, x):
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1)

    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.c, self.n, self.d = conv(), Norm(4), conv()

        def forward(self, x, target=None):
            y = self.d(self.n(self.c(x)))
            if self.training:
                return F.mse_loss(y, target)
            return y

    traced = df.trace(WithLoss(), image())
    student = df.rewrite(traced, traced.vanilla).train()
    student(image() + 3)
    assert not torch.equal(student.get_buffer("n.running_mean"), torch.zeros(4))


def test_types_of_subclasses_can_be_ignored():
    traced = df.trace(nn.Sequential(conv(), Same(4, 4, 3), conv()), image(), ignore=[Same])
    assert [layer.where for layer in traced.network.layers] == ["0", "2"]
    assert traced.blueprint.ignore == ("1",)


def test_opaque_module_that_only_writes_in_place():
    class Writes(nn.Module):
        def forward(self, x):
            if x.sum() < 1e30:
                x.mul_(2)

    def forward(net, x):
        y = net.a(x)
        net.w(y)
        return net.b(y)

    vanilla(Net(forward, a=conv(), b=conv(), w=Writes()), maps(1, 4, 8, 8))


def test_weights_of_an_opaque_module_are_not_merged():
    class Opaque(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = conv(4, 4, 1)

        def forward(self, x):
            return self.conv(x) if x.sum() > -1e30 else x

    def forward(net, x):
        return net.o(F.relu(net.n(F.conv2d(x, net.o.conv.weight, net.o.conv.bias))))

    norm = nn.BatchNorm2d(4)
    norm.running_var.fill_(3)
    vanilla(Net(forward, o=Opaque(), n=norm), maps(1, 4, 8, 8))


def test_tracing_does_not_update_a_batch_norm_that_stays_in_training_mode():
    class Training(nn.BatchNorm2d):
        def train(self, mode=True):
            return super().train(True)

    model = nn.Sequential(conv(), Training(4), conv()).eval()
    traced = df.trace(model, image())
    student = df.rewrite(traced, traced.vanilla)
    df.verify(student, df.merge(student))
    for made in (model, student):
        assert made.get_buffer("1.num_batches_tracked") == 0


CREATED = {
    "zeros": lambda x: torch.zeros(x.size(0), 4, 1, 1, dtype=x.dtype) + 1,
    "ones": lambda x: torch.ones(*x.shape),
    "empty": lambda x: torch.empty(x.shape[0], 1, 1, 1).fill_(2),
    "rand": lambda x: torch.rand(x.shape[0], 1, 1, 1) * 0 + 1,
    "randn": lambda x: torch.randn(x.shape) * 0 + 1,
    "whole shape": lambda x: torch.ones(x.shape, dtype=x.dtype) * 2,
    "second": lambda x: torch.ones(1, 1, x.shape[2], 1),
}


@pytest.mark.parametrize("inside", [False, True], ids=["top level", "submodule"])
@pytest.mark.parametrize("name", CREATED)
def test_tensor_of_the_size_of_a_value_is_created_at_every_size(name, inside):
    part = Net(lambda net, x: net.b(F.relu(net.a(x))) * CREATED[name](x), a=conv(), b=conv())
    model = nn.Sequential(conv(), part) if inside else part
    traced = df.trace(model, image())
    assert traced.depth == 2 + inside
    merged = df.merge(df.rewrite(traced, traced.vanilla))
    for x in (image(), image(size=17, batch=3)):
        for each in (merged, pickle.loads(pickle.dumps(merged))):
            with torch.no_grad():
                agree(each(x), model(x), tolerance=1e-5)
