"""trace() does not change the user's model, and students keep its modes and hooks."""

import copy
import io
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from test_arguments import Detector, small
from torch import nn
from torchvision import models

import depthfold as df
from depthfold.errors import TraceError
from nets import Net, agree, conv, image, only


class Dropping(nn.Module):
    """A network with a functional dropout."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = conv(), nn.BatchNorm2d(4)

    def forward(self, x):
        return F.dropout(self.norm(self.conv(x)), 0.5, self.training)


@pytest.mark.parametrize("at", [None, "part"])
@pytest.mark.parametrize("frozen", [False, True])
def test_graph_keeps_the_modes_of_the_modules(at, frozen):
    part = nn.Sequential(Dropping())
    # The norm also has an earlier name in the rest of the model.
    model = part if at is None else Net(lambda net, x: net.part(x), norm=part[0].norm, part=part)
    part[0].train(not frozen)
    graph = df.trace(model, image(), at=at).graph
    modes = {type(module): module.training for module in graph.modules()}
    assert (modes[nn.BatchNorm2d], modes[nn.Dropout], graph.training) == (not frozen, not frozen, True)


def fingerprint(model):
    """Return everything about a model that a user could observe."""
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    modules = dict(model.named_modules())
    return (
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
        {name: module.training for name, module in modules.items()},
        {name: sorted(vars(module)) for name, module in modules.items()},
        {name: (len(module._forward_hooks), len(module._forward_pre_hooks)) for name, module in modules.items()},
        {name: str(module) for name, module in modules.items()},
        {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        {name: parameter.grad is None for name, parameter in model.named_parameters()},
        [id(parameter) for parameter in model.parameters()],
    )


def same(one, two):
    assert one[0].keys() == two[0].keys()
    assert all(torch.equal(one[0][name], two[0][name]) for name in one[0])
    assert one[1:] == two[1:]


def train_mode(model):
    return model.train()


def eval_mode(model):
    return model.eval()


def some_frozen(model):
    model.train()
    model.layer1.eval()
    model.bn1.eval()
    model.conv1.weight.requires_grad_(False)
    return model


@pytest.mark.parametrize("mode", [train_mode, eval_mode, some_frozen])
def test_user_model_is_not_changed(mode):
    model = mode(models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=10))
    model.fc.register_forward_hook(lambda *given: None)
    before = fingerprint(model)
    x = torch.randn(1, 3, 64, 64)
    kept = x.clone()
    traced = df.trace(model, x)
    same(fingerprint(model), before)
    student = df.rewrite(traced, only(traced, 1, 3))
    same(fingerprint(model), before)
    df.verify(student, df.merge(student))
    same(fingerprint(model), before)
    assert torch.equal(x, kept)


@pytest.mark.parametrize("mode", [train_mode, eval_mode, some_frozen])
def test_student_has_the_modes_of_the_user_model(mode):
    model = mode(models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=10))
    traced = df.trace(model, torch.randn(1, 3, 64, 64))
    student = df.rewrite(traced, only(traced, 1, 3))
    modes = {name: module.training for name, module in model.named_modules()}
    modules = dict(student.named_modules())
    assert "layer1.0.bn1" in modules
    for name, module in modules.items():
        if name in modes:
            assert module.training is modes[name], name


def test_user_model_is_not_changed_with_at():
    model = Detector().train()
    model.backbone["body"][1].eval()
    before = fingerprint(model)
    traced = df.trace(model, image(), at="backbone.body")
    student = df.rewrite(traced, df.Plan((), ()))
    df.verify(student, df.merge(student), image())
    same(fingerprint(model), before)
    assert not student.backbone["body"].get_submodule("1").training
    assert student.head.training


def test_later_changes_of_the_model_do_not_affect_the_network():
    model, x = small().eval(), image()
    wanted = copy.deepcopy(model)(x)
    traced = df.trace(model, x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    agree(df.rewrite(traced, traced.vanilla)(x), wanted, 1e-6)


def scale_output(module, given, output):
    return output * 2


def scale_input(module, given):
    return (given[0] * 2,)


def hooked(module, kind):
    if kind == "after":
        module.register_forward_hook(scale_output)
    else:
        module.register_forward_pre_hook(scale_input)
    return module


def keeps_or_refuses_hooks(model, x, **given):
    """Check that the student computes what the model with hooks computes, or that tracing refuses the hooks."""
    try:
        traced = df.trace(model, x, **given)
    except TraceError as error:
        assert "hook" in str(error)
        return
    agree(df.rewrite(traced, traced.vanilla)(x), model(x))


@pytest.mark.parametrize("kind", ["before", "after"])
def test_hooks_on_the_model_are_kept_or_refused(kind):
    keeps_or_refuses_hooks(hooked(small().double().eval(), kind), image().double())


@pytest.mark.parametrize("kind", ["before", "after"])
def test_hooks_on_the_submodule_at_are_kept_or_refused(kind):
    model = Detector().double().eval()
    hooked(model.backbone["body"], kind)
    keeps_or_refuses_hooks(model, image().double(), at="backbone.body")


def test_model_that_writes_to_its_input_merges_without_changing_the_example():
    model = Net(lambda net, x: net.b(F.relu(net.a(x.sub_(0.5).div_(0.25)))), a=conv(), b=conv()).double().eval()
    x = image().double()
    traced = df.trace(model, x)
    assert torch.equal(x, image().double())
    student = df.rewrite(traced, df.Plan((), ()))
    shallow = df.merge(student)
    assert df.verify(student, shallow, x).ok
    assert torch.equal(x, image().double())
    agree(shallow(x.clone()), student(x.clone()))


def test_frozen_parameters_stay_frozen_in_the_student():
    model = small()
    model[0].weight.requires_grad_(False)
    traced = df.trace(model, image())
    frozen = {
        name for name, parameter in df.rewrite(traced, traced.vanilla).named_parameters() if not parameter.requires_grad
    }
    assert frozen == {"0.weight"}


class Annotated(nn.Module):
    """A network whose annotations are strings, as after `from __future__ import annotations`."""

    def __init__(self):
        super().__init__()
        self.one, self.two = conv(), conv()

    def forward(self, x: "torch.Tensor") -> "torch.Tensor":
        return self.two(F.relu(self.one(x)))


def test_a_network_with_annotations_can_be_sent_to_a_worker():
    traced = df.trace(Annotated(), image())
    sent = pickle.loads(pickle.dumps(traced))
    agree(sent.graph(image()), traced.graph(image()))


class WithAttribute(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.part = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
        self.part.settings = value

    def forward(self, x):
        return self.part(x)


def test_python_module_as_an_attribute_is_not_copied():
    traced = df.trace(WithAttribute(math), torch.randn(1, 3, 16, 16))
    assert traced.depth == 2
    assert df.merge(df.rewrite(traced, traced.vanilla)) is not None


def test_attribute_that_cannot_be_copied_is_named(tmp_path):
    with (tmp_path / "log").open("w") as file, pytest.raises(TraceError) as error:
        df.trace(WithAttribute(file), torch.randn(1, 3, 16, 16))
    assert "Remove the attribute part.settings, or make it when it is used." in str(error.value)
