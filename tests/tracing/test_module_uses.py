"""Modules that are used twice, hooked or replaced cannot be merged."""

from types import MethodType

import pytest
import torch.nn.functional as F
from test_refusals import Between
from torch import nn

import depthfold as df
from nets import Net, Opaque, codes, conv, folds_exactly, image, refusal


def test_module_used_twice_is_refused_with_the_number_of_calls():
    model = Net(lambda net, x: net.b(F.relu(net.a(F.relu(net.a(x))))), a=conv(), b=conv())
    traced = folds_exactly(model, image())
    assert [layer.where for layer in traced.network.layers] == ["b"]
    assert codes(traced)["a"] == "used-twice"
    assert "called 2 times" in refusal(traced, "a").why


def test_submodule_used_twice_is_named_as_one_to_trace():
    trunk = Net(lambda net, x: net.b(F.relu(net.a(x))), a=conv(), b=conv())
    model = Net(lambda net, x: net.head(F.relu(net.trunk(x) - net.trunk(2 * x))), trunk=trunk, head=conv())
    why = refusal(df.trace(model, image()), "trunk.a").why
    assert why == (
        "it is called 2 times, so its weights cannot be merged into one place; to merge it, trace trunk alone: "
        "at= (--submodule)"
    )
    assert df.trace(model, image(), at="trunk").network.depth == 2
    inside = df.trace(Net(lambda net, x: net.siamese(x), siamese=model), image(), at="siamese")
    assert "trace siamese.trunk alone" in refusal(inside, "trunk.a").why
    once = Net(lambda net, x: net.a(F.relu(net.a(x))), a=conv())
    assert "trace" not in refusal(df.trace(Net(lambda net, x: net.once(x), once=once), image()), "once.a").why


def test_batch_norm_used_twice_is_refused():
    model = Net(
        lambda net, x: net.c(net.norm(net.b(F.relu(net.norm(net.a(x)))))),
        a=conv(),
        b=conv(),
        c=conv(),
        norm=nn.BatchNorm2d(4),
    )
    traced = folds_exactly(model, image())
    assert traced.network.barriers == (1, 2)
    assert codes(traced)["norm"] == "used-twice"


def test_activation_used_twice_is_allowed():
    model = Net(lambda net, x: net.c(net.act(net.b(net.act(net.a(x))))), a=conv(), b=conv(), c=conv(), act=nn.PReLU())
    assert folds_exactly(model, image()).network.barriers == ()


@pytest.mark.parametrize("name", ["register_forward_hook", "register_forward_pre_hook"])
def test_convolution_with_hooks_is_refused(name):
    model = Between(conv())
    getattr(model.part, name)(lambda *given: None)
    traced = df.trace(model, image())
    assert traced.network.barriers == (1,)
    assert codes(traced)["part"] == "hooked"


@pytest.mark.parametrize("module", [nn.Dropout(0.1), nn.Identity()], ids=["dropout", "identity"])
def test_hooked_no_op_is_a_barrier(module):
    module.register_forward_hook(lambda part, given, output: output * 2)
    traced = folds_exactly(Between(module), image())
    assert traced.network.barriers == (1,)


def doubled(part, x):
    return F.conv2d(x, 2 * part.weight, part.bias, padding=1)


def test_convolution_with_a_replaced_forward_is_refused():
    part = conv()
    part.forward = MethodType(doubled, part)
    traced = folds_exactly(Between(part), image())
    assert [layer.where for layer in traced.network.layers] == ["before", "after"]
    assert codes(traced)["part"] == "custom-convolution"


def test_batch_norm_with_a_replaced_forward_is_refused():
    norm = nn.BatchNorm2d(4)
    norm.forward = MethodType(lambda part, x: x * 2, norm)
    traced = folds_exactly(nn.Sequential(conv(), norm, conv()), image())
    assert traced.network.barriers == (1,)
    assert codes(traced)["1"] == "custom-norm"


def test_convolution_whose_weight_is_read_elsewhere_keeps_it():
    model = Net(
        lambda net, x: net.b(F.relu(net.a(x))) + F.conv2d(x, net.a.weight, padding=1), a=conv(), b=conv(), c=conv()
    )
    folds_exactly(model, image())


def test_convolution_that_an_opaque_module_also_uses_is_refused():
    shared = conv()
    model = Net(lambda net, x: net.o(net.b(F.relu(net.a(x)))), a=conv(), b=shared, o=Opaque(shared))
    traced = folds_exactly(model, image())
    assert codes(traced)["b"] == "used-twice"


def test_module_that_the_rest_of_the_model_also_uses_is_refused():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(conv(), nn.ReLU(), conv())
            self.again = self.body[2]

        def forward(self, x):
            y = self.body(x)
            return self.again(y) if y.sum() > 0 else y

    traced = df.trace(Tied().eval(), image(), at="body")
    assert [layer.where for layer in traced.network.layers] == ["0"]
    assert codes(traced)["2"] == "used-twice"
    assert refusal(traced, "2").why == "the model also has it as again; delete that attribute if nothing uses it"
