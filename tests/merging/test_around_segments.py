"""Modules outside the segments of a merged network: batch norms are folded or replaced, and nothing else changes."""

import pytest
import torch
import torch.nn.functional as F
from timm.layers import BatchNormAct2d
from torch import nn

import depthfold as df
from depthfold.testing import randomise_statistics
from nets import Net, Opaque, agree, conv, image


def merge_vanilla(model, x=None, **given):
    """Return the merged network of the vanilla plan, after comparing it with the model."""
    model = randomise_statistics(model).double().eval()
    x = (image() if x is None else x).double()
    traced = df.trace(model, x, **given)
    shallow = df.merge(df.rewrite(traced, traced.vanilla))
    with torch.no_grad():
        found, wanted = shallow(x), model(x)
        for one, two in zip(found, wanted, strict=True) if isinstance(wanted, list) else [(found, wanted)]:
            agree(one, two)
    return shallow


class Own1d(nn.BatchNorm1d):
    pass


class Own2d(nn.BatchNorm2d):
    pass


class Own3d(nn.BatchNorm3d):
    pass


class OwnSynchronised(nn.SyncBatchNorm):
    pass


class AnySize(nn.BatchNorm2d):
    """A BatchNorm2d that accepts any number of dimensions."""

    def _check_input_dim(self, input):
        pass


class NoShift(nn.BatchNorm2d):
    def __init__(self, channels):
        super().__init__(channels)
        self.weight.data.uniform_(0.5, 1.5)
        self.bias = None


def head(norm):
    return nn.Sequential(conv(), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 6), norm, nn.Tanh())


@pytest.mark.parametrize(
    ("model", "x", "kind"),
    [
        (head(Own1d(6)), None, nn.BatchNorm1d),
        (head(AnySize(6)), None, AnySize),
        (nn.Sequential(Own1d(3), nn.Conv1d(3, 4, 3)), torch.randn(2, 3, 9), nn.BatchNorm1d),
        (nn.Sequential(Own2d(4), conv()), None, nn.BatchNorm2d),
        (nn.Sequential(Own3d(2), nn.Conv3d(2, 4, 3)), torch.randn(2, 2, 5, 6, 4), nn.BatchNorm3d),
        (nn.Sequential(OwnSynchronised(3), nn.Conv1d(3, 4, 3)), torch.randn(2, 3, 9), OwnSynchronised),
    ],
    ids=["1d in a head", "of any size", "1d", "2d", "3d", "synchronised"],
)
def test_custom_batch_norm_is_replaced_by_pytorchs_of_the_same_dimension(model, x, kind):
    shallow = merge_vanilla(model, x)
    (found,) = [part for part in shallow.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    assert type(found) is kind


def test_batch_norm_without_bias_keeps_its_weight():
    model, x = nn.Sequential(NoShift(4), conv()).double().eval(), image().double()
    traced = df.trace(model, x)
    agree(df.merge(df.rewrite(traced, traced.vanilla))(x), model(x))


def test_norm_that_contains_an_activation_keeps_it_in_every_call():
    def run(net, x):
        a = net.stem(x)
        b = net.down(a)
        return [net.norm(net.conv(a)), net.norm(net.conv(b)), net.norm(b)]

    parts = dict(stem=conv(), down=conv(stride=2), conv=conv(), norm=BatchNormAct2d(4))
    shallow = merge_vanilla(Net(run, **parts))
    calls = [node for node in shallow.graph.nodes if node.op == "call_module"]
    kinds = [type(shallow.get_submodule(node.target)).__name__ for node in calls]
    assert (kinds.count("BatchNorm2d"), kinds.count("ReLU")) == (3, 3)
    assert [type(part) for part in shallow.modules()].count(nn.BatchNorm2d) == 1


def test_activation_of_a_norm_gets_an_unused_name():
    parts = dict(norm=BatchNormAct2d(4), norm_act=nn.Sigmoid(), a=conv())
    merge_vanilla(Net(lambda net, x: net.a(net.norm_act(net.norm(x))), **parts))


def reads_the_convolution(net, x):
    y = net.b(F.relu(net.norm(net.a(x))))
    return F.conv_transpose2d(y, net.a.weight, padding=1)


def reads_the_norm(net, x):
    return net.b(net.norm(net.a(x))) * net.norm.weight.reshape(1, -1, 1, 1)


def reads_the_activation(net, x):
    return net.b(net.norm(net.a(x))) * net.norm.act.weight


@pytest.mark.parametrize("run", [reads_the_convolution, reads_the_norm], ids=["convolution", "norm"])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, BatchNormAct2d])
def test_norm_is_not_folded_if_the_weights_are_read_elsewhere(run, norm):
    shallow = merge_vanilla(Net(run, a=conv(), norm=norm(4), b=conv()), ignore=["a", "norm"])
    assert any(isinstance(part, nn.BatchNorm2d) for part in shallow.modules())


def test_norm_stays_if_the_weight_of_its_activation_is_read_elsewhere():
    norm = BatchNormAct2d(4, act_layer=nn.PReLU, act_kwargs={"num_parameters": 1}, inplace=False)
    for ignore in ((), ("a", "norm")):
        merge_vanilla(Net(reads_the_activation, a=conv(), norm=norm, b=conv()), ignore=ignore)


def test_norm_is_not_folded_if_an_opaque_module_calls_the_convolution():
    shared = conv()
    parts = dict(a=shared, norm=nn.BatchNorm2d(4), b=conv(), o=Opaque(shared))
    merge_vanilla(Net(lambda net, x: net.o(net.b(F.relu(net.norm(net.a(x))))), **parts))


def test_norms_of_ignored_modules_are_folded():
    stem = nn.Sequential(conv(bias=False), nn.BatchNorm2d(4), nn.ReLU())
    shallow = merge_vanilla(nn.Sequential(stem, conv(), nn.ReLU(), conv()), ignore=["0"])
    assert [(name, type(part).__name__) for name, part in shallow.named_modules() if name.startswith("0.")] == [
        ("0.0", "Conv2d"),
        ("0.2", "ReLU"),
    ]
