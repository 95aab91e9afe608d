"""What lies around the segments of a merged network: batch norms folded or made plain, and nothing else changed."""

import pytest
import torch
import torch.nn.functional as F
from timm.layers import BatchNormAct2d
from torch import nn

import depthfold as df
from depthfold.testing import randomise_statistics
from nets import Net, Opaque, agree, conv, image


def merged_as_it_is(model, x=None, **given):
    """The merged network of the plan that changes nothing. It computes what the model computes, list or not."""
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
    """Takes what BatchNorm2d does not take."""

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
def test_a_batch_norm_of_the_users_is_one_of_pytorchs_with_as_many_dimensions(model, x, kind):
    shallow = merged_as_it_is(model, x)
    (found,) = [part for part in shallow.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    assert type(found) is kind


def test_a_batch_norm_without_a_shift_keeps_its_scale():
    model, x = nn.Sequential(NoShift(4), conv()).double().eval(), image().double()
    traced = df.trace(model, x)
    agree(df.merge(df.rewrite(traced, traced.vanilla))(x), model(x))


def test_a_norm_with_an_activation_inside_keeps_it_in_every_call():
    def run(net, x):
        a = net.stem(x)
        b = net.down(a)
        return [net.norm(net.conv(a)), net.norm(net.conv(b)), net.norm(b)]

    parts = dict(stem=conv(), down=conv(stride=2), conv=conv(), norm=BatchNormAct2d(4))
    shallow = merged_as_it_is(Net(run, **parts))
    calls = [node for node in shallow.graph.nodes if node.op == "call_module"]
    kinds = [type(shallow.get_submodule(node.target)).__name__ for node in calls]
    assert (kinds.count("BatchNorm2d"), kinds.count("ReLU")) == (3, 3)
    assert [type(part) for part in shallow.modules()].count(nn.BatchNorm2d) == 1


def test_the_activation_of_a_norm_takes_no_name_that_is_taken():
    parts = dict(norm=BatchNormAct2d(4), norm_act=nn.Sigmoid(), a=conv())
    merged_as_it_is(Net(lambda net, x: net.a(net.norm_act(net.norm(x))), **parts))


def reads_the_convolution(net, x):
    y = net.b(F.relu(net.norm(net.a(x))))
    return F.conv_transpose2d(y, net.a.weight, padding=1)


def reads_the_norm(net, x):
    return net.b(net.norm(net.a(x))) * net.norm.weight.reshape(1, -1, 1, 1)


def reads_the_activation(net, x):
    return net.b(net.norm(net.a(x))) * net.norm.act.weight


@pytest.mark.parametrize("run", [reads_the_convolution, reads_the_norm], ids=["convolution", "norm"])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, BatchNormAct2d])
def test_no_norm_is_folded_where_other_code_reads_the_weights(run, norm):
    shallow = merged_as_it_is(Net(run, a=conv(), norm=norm(4), b=conv()), ignore=["a", "norm"])
    assert any(isinstance(part, nn.BatchNorm2d) for part in shallow.modules())


def test_a_norm_stays_where_other_code_reads_the_slope_of_the_activation_inside():
    norm = BatchNormAct2d(4, act_layer=nn.PReLU, act_kwargs={"num_parameters": 1}, inplace=False)
    for ignore in ((), ("a", "norm")):
        merged_as_it_is(Net(reads_the_activation, a=conv(), norm=norm, b=conv()), ignore=ignore)


def test_no_norm_is_folded_into_a_convolution_that_an_opaque_module_calls_too():
    shared = conv()
    parts = dict(a=shared, norm=nn.BatchNorm2d(4), b=conv(), o=Opaque(shared))
    merged_as_it_is(Net(lambda net, x: net.o(net.b(F.relu(net.norm(net.a(x))))), **parts))


def test_what_is_ignored_is_no_layer_but_its_norms_are_folded_all_the_same():
    stem = nn.Sequential(conv(bias=False), nn.BatchNorm2d(4), nn.ReLU())
    shallow = merged_as_it_is(nn.Sequential(stem, conv(), nn.ReLU(), conv()), ignore=["0"])
    assert [(name, type(part).__name__) for name, part in shallow.named_modules() if name.startswith("0.")] == [
        ("0.0", "Conv2d"),
        ("0.2", "ReLU"),
    ]
