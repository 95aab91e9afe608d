"""Norms, activations, padding, additions and no-ops that join a layer."""

import pytest
import torch
import torch.nn.functional as F
from timm.layers import BatchNormAct2d, DropPath, FrozenBatchNormAct2d
from torch import nn
from torchvision.ops import FrozenBatchNorm2d, StochasticDepth

import depthfold as df
from nets import Net, agree, codes, conv, folds_exactly, image, pairs

MODULES = {
    "relu": nn.ReLU(),
    "relu6": nn.ReLU6(inplace=True),
    "leaky_relu": nn.LeakyReLU(0.2),
    "silu": nn.SiLU(),
    "gelu": nn.GELU(approximate="tanh"),
    "hardswish": nn.Hardswish(),
    "sigmoid": nn.Sigmoid(),
    "tanh": nn.Tanh(),
    "prelu": nn.PReLU(4),
    "elu": nn.ELU(0.7),
    "mish": nn.Mish(),
    "softplus": nn.Softplus(),
}
FUNCTIONS = {
    "relu": F.relu,
    "relu (torch)": torch.relu,
    "relu (in place)": F.relu_,
    "relu6": F.relu6,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "leaky_relu (by name)": lambda x: F.leaky_relu(x, negative_slope=0.2, inplace=True),
    "silu": F.silu,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "hardswish": F.hardswish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu (method)": lambda x: x.relu(),
    "relu (method in place)": lambda x: x.relu_(),
    "sigmoid (method)": lambda x: x.sigmoid(),
    "tanh (method)": lambda x: x.tanh(),
}


@pytest.mark.parametrize("kind", MODULES)
def test_all_activation_modules(kind):
    traced = folds_exactly(nn.Sequential(conv(), MODULES[kind], conv(), MODULES[kind], conv()), image())
    assert [layer.activation for layer in traced.network.layers] == [kind, kind, None]
    assert traced.network.barriers == ()


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_all_activation_functions_and_methods(kind):
    function = FUNCTIONS[kind]
    model = Net(lambda net, x: net.c(function(net.b(function(net.a(x))))), a=conv(), b=conv(), c=conv())
    traced = folds_exactly(model, image())
    name = kind.split(" ")[0]
    assert [layer.activation for layer in traced.network.layers] == [name, name, None]
    assert traced.network.barriers == ()


def test_functional_prelu_is_a_barrier():
    model = Net(
        lambda net, x: net.b(F.prelu(net.a(x), net.slope)),
        a=conv(),
        b=conv(),
        slope=nn.Parameter(torch.full((4,), 0.1)),
    )
    traced = folds_exactly(model, image())
    assert (traced.depth, traced.network.barriers) == (2, (1,))
    assert "prelu" in codes(traced)


def test_two_activations_in_a_row_end_the_chain():
    traced = folds_exactly(nn.Sequential(conv(), nn.ReLU(), nn.Sigmoid(), conv()), image())
    assert (traced.depth, traced.network.barriers, traced.network.layers[0].activation) == (2, (1,), "relu")
    (reason,) = [refusal.why for refusal in traced.network.refusals if refusal.where == "2"]
    assert "other operations" not in reason  # no other operation reads the value


def rough(norm):
    """Fill the statistics and parameters of a norm with random values."""
    generator = torch.Generator().manual_seed(7)
    for name in ("running_mean", "running_var", "weight", "bias"):
        if getattr(norm, name, None) is not None:
            getattr(norm, name).data.copy_(torch.rand(4, generator=generator) + 0.3)
    return norm


NORMS = {
    "plain": lambda: nn.BatchNorm2d(4, eps=0.1),
    "not affine": lambda: nn.BatchNorm2d(4, affine=False),
    "synchronised": lambda: nn.SyncBatchNorm(4, eps=0.01),
    "frozen": lambda: FrozenBatchNorm2d(4, eps=0.2),
    "timm without activation": lambda: BatchNormAct2d(4, apply_act=False),
}


@pytest.mark.parametrize("kind", NORMS)
def test_all_batch_norms_are_folded(kind):
    model = nn.Sequential(conv(), rough(NORMS[kind]()), nn.ReLU(), conv(bias=False), rough(NORMS[kind]()))
    traced = folds_exactly(model, image())
    assert [layer.norm for layer in traced.network.layers] == ["1", "4"]
    assert traced.network.barriers == ()
    assert [layer.activation for layer in traced.network.layers] == ["relu", None]


@pytest.mark.parametrize("kind", [BatchNormAct2d, FrozenBatchNormAct2d])
def test_norm_with_an_activation_inside_gives_the_layer_both(kind):
    model = nn.Sequential(conv(), rough(kind(4, act_layer=nn.SiLU)), conv(), rough(kind(4, act_layer=nn.SiLU)), conv())
    traced = folds_exactly(model, image())
    assert [layer.norm for layer in traced.network.layers] == ["1", "3", None]
    assert [layer.activation for layer in traced.network.layers] == ["silu", "silu", None]
    assert traced.network.barriers == ()


def test_batch_norm_without_statistics_is_refused():
    traced = df.trace(nn.Sequential(conv(), nn.BatchNorm2d(4, track_running_stats=False), conv()), image())
    assert (traced.depth, traced.network.barriers) == (2, (1,))
    assert codes(traced)["1"] == "batch-statistics"


def test_batch_norm_with_its_own_forward_is_recorded():
    class Twisted(nn.BatchNorm2d):
        def forward(self, x):
            return super().forward(x) * 2

    traced = folds_exactly(nn.Sequential(conv(), Twisted(4), conv()), image())
    assert traced.network.layers[0].norm == "1"
    assert traced.network.barriers == ()


@pytest.mark.parametrize(
    "nothing",
    [
        nn.Dropout(0.3),
        nn.Dropout2d(0.3),
        nn.Identity(),
        DropPath(0.2),
        StochasticDepth(0.2, "row"),
        nn.AlphaDropout(0.1),
    ],
    ids=lambda module: type(module).__name__,
)
def test_no_ops_in_evaluation_do_not_interrupt_a_chain(nothing):
    model = Net(
        lambda net, x: net.c(net.drop(net.b(net.drop(net.act(net.norm(net.drop(net.a(x))))))) + x),
        a=conv(),
        norm=nn.BatchNorm2d(4),
        act=nn.ReLU(),
        b=conv(),
        c=conv(),
        drop=nothing,
    )
    traced = folds_exactly(model, image())
    assert (traced.depth, traced.network.barriers) == (3, ())
    assert [(skip.source, skip.target) for skip in traced.network.skips] == [(0, 2)]
    assert traced.network.layers[0].norm == "norm"


@pytest.mark.parametrize("function", [F.dropout, F.dropout2d, F.alpha_dropout, F.feature_alpha_dropout])
def test_functional_dropout_follows_train_and_eval_after_rewriting(function):
    model = Net(lambda net, x: net.b(function(net.a(x), 0.5, training=net.training)), a=conv(), b=conv())
    x = image()
    for training in (True, False):
        traced = df.trace(model.train(training), x)
        assert (traced.depth, traced.network.barriers) == (2, ())
        student = df.rewrite(traced, df.Plan((), (1,)))
        assert student.training is training
        student.train()
        torch.manual_seed(0)
        first, *others = (student(x) for _ in range(16))
        assert not all(torch.equal(first, other) for other in others)  # two draws for four channels may be the same
        student.eval()
        assert torch.equal(student(x), student(x))
        agree(student(x), model.eval()(x), 1e-6)
    agree(df.merge(student)(x), student(x), 1e-4)


def test_dropout_that_is_always_active_is_a_barrier():
    model = Net(lambda net, x: net.b(F.dropout(net.a(x), 0.5, training=True)), a=conv(), b=conv()).eval()
    traced = df.trace(model, image())
    student = df.rewrite(traced, traced.vanilla).eval()
    assert not torch.equal(model(image()), model(image()))
    assert traced.network.barriers == (1,)
    assert not torch.equal(student(image()), student(image()))  # the student is random, as is the model


def paddings():
    ones = dict(kernel_size=3, stride=1)
    yield "number", nn.Conv2d(4, 4, **ones, padding=2), ((2, 2), (2, 2))
    yield "tuple", nn.Conv2d(4, 4, (3, 5), padding=(0, 2)), ((0, 0), (2, 2))
    yield "same", nn.Conv2d(4, 4, 3, padding="same", dilation=2), ((2, 2), (2, 2))
    yield "same, even kernel", nn.Conv2d(4, 4, (2, 4), padding="same"), ((0, 1), (1, 2))
    yield "valid", nn.Conv2d(4, 4, 3, padding="valid"), ((0, 0), (0, 0))
    yield "ZeroPad2d", nn.Sequential(nn.ZeroPad2d((1, 2, 0, 3)), nn.Conv2d(4, 4, 3)), ((0, 3), (1, 2))
    yield "ConstantPad2d", nn.Sequential(nn.ConstantPad2d(1, 0.0), nn.Conv2d(4, 4, 3, padding=1)), ((2, 2), (2, 2))
    yield "F.pad", Net(lambda n, x: n.c(F.pad(x, (0, 1))), c=nn.Conv2d(4, 4, 3)), ((0, 0), (0, 1))
    yield (
        "F.pad, all",
        Net(lambda n, x: n.c(F.pad(x, [1, 0, 2, 1], value=0.0)), c=nn.Conv2d(4, 4, 3, stride=2)),
        ((2, 1), (1, 0)),
    )


@pytest.mark.parametrize(("part", "padding"), [p[1:] for p in paddings()], ids=[p[0] for p in paddings()])
def test_all_forms_of_zero_padding_join_the_layer(part, padding):
    traced = folds_exactly(nn.Sequential(conv(), nn.ReLU(), part, nn.ReLU(), conv()), image())
    assert (traced.depth, traced.network.barriers) == (3, ())
    assert traced.network.layers[1].shape.padding == padding
    assert traced.network.layers[1].in_size == (12, 13)


@pytest.mark.parametrize(
    "pad",
    [
        nn.ConstantPad2d(1, 0.5),
        nn.ReflectionPad2d(1),
        nn.ReplicationPad2d(1),
        nn.ZeroPad2d(-1),
        nn.CircularPad2d(1),
        Net(lambda net, x: F.pad(x, (1, 1, 1, 1), mode="reflect")),
        Net(lambda net, x: F.pad(x, (1, 1), value=2.0)),
        Net(lambda net, x: F.pad(x, (0, 0, 0, 0, 0, 0))),
    ],
)
def test_other_padding_is_a_barrier(pad):
    traced = folds_exactly(nn.Sequential(conv(), nn.ReLU(), pad, conv(), nn.ReLU()), image())
    assert (traced.depth, traced.network.barriers) == (2, (1,))
    assert "padding" in codes(traced).values()


def test_one_and_three_dimensions():
    line = nn.Sequential(nn.Conv1d(3, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 2, 5, stride=2))
    assert folds_exactly(line, torch.randn(2, 3, 17)).depth == 2
    cube = nn.Sequential(
        nn.Conv3d(2, 4, (1, 3, 2), padding=(0, 1, 1)), nn.BatchNorm3d(4), nn.ReLU(), nn.Conv3d(4, 2, 3)
    )
    assert folds_exactly(cube, torch.randn(1, 2, 5, 6, 7)).depth == 2


ADDITIONS = {
    "operator": lambda a, b: a + b,
    "turned round": lambda a, b: b + a,
    "function": torch.add,
    "method": lambda a, b: a.add(b),
    "in place": lambda a, b: a.add_(b),
}


@pytest.mark.parametrize("kind", ADDITIONS)
def test_all_forms_of_residual_additions(kind):
    add = ADDITIONS[kind]
    model = Net(lambda net, x: net.c(add(net.b(F.relu(net.a(x))), x)), a=conv(), b=conv(), c=conv())
    traced = folds_exactly(model, image())
    assert [(skip.source, skip.target) for skip in traced.network.skips] == [(0, 2)]
    assert traced.network.barriers == ()


def test_residual_added_with_the_in_place_operator():
    def run(net, x):
        y = net.b(F.relu(net.a(x)))
        y += x
        return net.c(y)

    traced = folds_exactly(Net(run, a=conv(), b=conv(), c=conv()), image())
    assert [(skip.source, skip.target) for skip in traced.network.skips] == [(0, 2)]


def test_projection_with_its_batch_norm_is_a_skip():
    model = Net(
        lambda net, x: net.c(F.relu(net.b(F.relu(net.a(x))) + net.down(x))),
        a=conv(4, 6, stride=2),
        b=conv(6, 6),
        c=conv(6, 6),
        down=nn.Sequential(nn.Conv2d(4, 6, 1, stride=2), nn.BatchNorm2d(6, eps=0.1)),
    )
    traced = folds_exactly(model, image(13))
    assert (traced.depth, traced.network.barriers) == (3, ())
    (skip,) = traced.network.skips
    assert (skip.source, skip.target, skip.projection.stride) == (0, 2, (2, 2))


def test_parallel_convolutions_and_a_batch_norm_become_one_layer():
    model = Net(
        lambda net, x: net.after(F.relu(net.three(x) + net.one(x) + net.norm(x))),
        three=nn.Sequential(conv(), nn.BatchNorm2d(4)),
        one=nn.Sequential(conv(kernel=1), nn.BatchNorm2d(4)),
        norm=nn.BatchNorm2d(4),
        after=conv(),
    )
    traced = folds_exactly(model, image())
    assert (traced.depth, len(traced.network.skips), traced.network.barriers) == (2, 2, ())
    assert pairs(traced.spans("full")) == [(0, 1), (0, 2), (1, 2)]


def test_value_added_to_itself_keeps_its_layers():
    def run(net, x):
        y = net.b(F.relu(net.a(x)))
        return net.c(F.relu(y + y))

    traced = folds_exactly(Net(run, a=conv(), b=conv(), c=conv()), image())
    assert [layer.where for layer in traced.network.layers] == ["a", "b", "c"]


NOTHING = {
    "y + 0": lambda y: y + 0,
    "0 + y": lambda y: 0 + y,
    "y * 1.0": lambda y: y * 1.0,
    "y.mul(1)": lambda y: y.mul(1),
}


@pytest.mark.parametrize("nothing", NOTHING)
def test_operation_that_changes_nothing_is_a_no_op(nothing):
    """MobileOne sums up branches with `out = 0`, then `out += branch(x)`; EDSR scales residuals, by default by 1."""
    model = Net(lambda net, x: net.b(F.relu(net.do(net.a(x)))), a=conv(), b=conv(), do=NOTHING[nothing])
    traced = folds_exactly(model, image())
    assert (traced.network.barriers, traced.network.layers[0].activation) == ((), "relu")


@pytest.mark.parametrize("addition", [dict(alpha=1), dict(), dict(alpha=2)])
def test_addition_with_keywords_ends_a_residual_unless_it_scales(addition):
    def run(net, x):
        return net.c(torch.add(net.b(F.relu(net.a(x))), other=x, **addition))

    model = Net(run, a=conv(), b=conv(), c=conv()).double().eval()
    traced = folds_exactly(model, image().double())
    assert len(traced.network.skips) == (addition.get("alpha", 1) == 1)
