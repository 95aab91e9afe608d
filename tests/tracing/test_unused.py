"""Operations whose results nothing reads: they are no layers, and everything else works as without them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import depthfold as df
from latency_workshop import COST, QUICK
from nets import Net, agree, conv, folds_exactly, image


def returned_in_training(net, x):
    x = F.relu(net.b(F.relu(net.a(x))))
    head = net.aux(x)
    y = net.c(x)
    return (y, head) if net.training else y


def with_activations_in_place(net, x):
    x = net.act(net.b(net.act(net.a(x))))
    net.act(net.aux(x))
    return net.c(x)


def with_a_dropout_in_place(net, x):
    x = F.relu(net.b(F.relu(net.a(x))))
    net.drop(net.aux(x))
    return net.c(x)


def one_level_of_several(net, x):
    levels = [F.relu(net.a(x))]
    levels.append(F.relu(net.b(levels[-1])))
    return [net.aux(levels[0]), net.c(levels[1])][-1]


@pytest.mark.parametrize(
    "run", [returned_in_training, with_activations_in_place, with_a_dropout_in_place, one_level_of_several]
)
def test_unused_convolutions_are_no_layers(run):
    parts = {name: conv() for name in ("a", "b", "c", "aux")}
    traced = folds_exactly(Net(run, **parts, act=nn.ReLU(inplace=True), drop=nn.Dropout(inplace=True)), image())
    assert [layer.where for layer in traced.network.layers] == ["a", "b", "c"]
    assert not traced.network.barriers
    assert df.measure_latency(traced, COST, timer=QUICK).original is not None


def test_unused_operation_that_writes_to_a_value_stays():
    def run(net, x):
        y = net.a(x)
        y.view(-1).mul_(2.0)
        return net.b(y)

    model = Net(run, a=conv(), b=conv()).double().eval()
    x = image().double()
    agree(df.rewrite(traced := df.trace(model, x), traced.vanilla)(x), model(x))


def test_dropout_as_a_statement_stays():
    def run(net, x):
        y = net.a(x)
        net.drop(y)
        return net.b(y)

    traced = df.trace(Net(run, a=conv(), b=conv(), drop=nn.Dropout(inplace=True)).eval(), image())
    student = df.rewrite(traced, traced.vanilla).train()
    assert any(isinstance(module, nn.Dropout) for module in student.modules())
    assert not torch.equal(student(image()), student(image()))


def test_unused_random_numbers_do_not_change_those_that_are_used():
    def run(net, x):
        torch.rand_like(x)
        return net.b(net.a(x) + torch.rand_like(x))

    model = Net(run, a=conv(), b=conv()).double().eval()
    x = image().double()
    student = df.rewrite(traced := df.trace(model, x), traced.vanilla)
    found = []
    for network in (student, model):
        torch.manual_seed(0)
        found.append(network(x))
    agree(*found)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: x.bernoulli(0.5),
        lambda x: F.dropout(x, 0.5, True),
        lambda x: torch.normal(x, 1.0),
        lambda x: torch.empty_like(x).uniform_(),
    ],
)
def test_all_unused_random_numbers_stay(draw):
    def run(net, x):
        draw(torch.full_like(x, 0.5))
        return net.b(net.a(x) + torch.rand_like(x))

    df.trace(Net(run, a=conv(), b=conv()).eval(), image())  # which compares the graph with the model


class Functional(nn.Module):
    """A head of functional layers."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = conv(), nn.BatchNorm2d(4)
        self.weight = nn.Parameter(torch.randn(4, 4, 1, 1))

    def forward(self, x):
        norm = self.norm
        x = F.batch_norm(
            self.conv(x), norm.running_mean, norm.running_var, norm.weight, norm.bias, self.training, norm.momentum
        )
        return F.conv2d(x, self.weight)


def test_unused_head_of_functional_layers_is_no_layer():
    parts = {name: conv() for name in ("a", "b", "c")}
    traced = folds_exactly(Net(returned_in_training, **parts, aux=Functional()), image())
    assert [layer.where for layer in traced.network.layers] == ["a", "b", "c"]


def test_unused_module_with_a_hook_stays():
    def run(net, x):
        y = net.a(x)
        net.probe(y)
        return net.b(y)

    seen = []
    model = Net(run, a=conv(), b=conv(), probe=nn.Identity()).eval()
    model.probe.register_forward_hook(lambda *given: seen.append(given))
    traced = df.trace(model, image())
    seen.clear()
    df.rewrite(traced, traced.vanilla)(image())
    assert len(seen) == 1
