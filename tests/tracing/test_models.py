"""trace(): its arguments, what it says when it cannot, and that it leaves the user's model alone."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision import models

import depthfold as df
from depthfold.errors import TraceError
from nets import Net, agree, codes, conv, image, only


def small():
    return nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(), conv(), nn.ReLU(), conv())


class Detector(nn.Module):
    """A backbone that can be traced and a head that cannot."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.ModuleDict({"body": small()})
        self.head = conv(4, 2)

    def forward(self, images, threshold=0.0):
        x = self.backbone["body"](torch.stack(images) if isinstance(images, list) else images)
        found = self.head(x)
        return found[found > threshold] if found.max() > threshold else found.flatten()


class Dropping(nn.Module):
    """A dropout without a module."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = conv(), nn.BatchNorm2d(4)

    def forward(self, x):
        return F.dropout(self.norm(self.conv(x)), 0.5, self.training)


@pytest.mark.parametrize("at", [None, "part"])
@pytest.mark.parametrize("frozen", [False, True])
def test_modes_are_kept_whatever_the_name_and_wherever_the_dropout(at, frozen):
    part = nn.Sequential(Dropping())
    # The rest of the model knows the norm by a name that comes first.
    model = part if at is None else Net(lambda net, x: net.part(x), norm=part[0].norm, part=part)
    part[0].train(not frozen)
    graph = df.trace(model, image(), at=at).graph
    modes = {type(module): module.training for module in graph.modules()}
    assert (modes[nn.BatchNorm2d], modes[nn.Dropout], graph.training) == (not frozen, not frozen, True)


def test_a_forward_that_cannot_be_traced_is_an_error_that_names_the_line_and_at():
    with pytest.raises(TraceError) as error:
        df.trace(Detector(), image())
    message = str(error.value)
    assert "The forward of Detector cannot be traced" in message
    assert "test_models.py:" in message
    assert "if found.max() > threshold" in message
    assert 'at="' in message
    assert "has the children backbone, head" in message


def test_at_traces_a_submodule_and_rewriting_returns_the_whole_model():
    model = Detector().double().eval()
    x = list(image().double())
    traced = df.trace(model, (x,), at="backbone.body")
    assert (traced.depth, traced.network.name) == (3, "Sequential")
    student = df.rewrite(traced, traced.vanilla)
    assert type(student) is Detector
    agree(student(x), model(x))
    shallow = df.merge(df.rewrite(traced, df.Plan((), ())))
    assert type(shallow) is Detector
    assert sum(isinstance(part, nn.Conv2d) for part in shallow.modules()) == 2


def test_at_of_a_detection_model_of_torchvision():
    model = models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None).eval()
    images = [torch.rand(3, 40, 56)]
    with pytest.raises(TraceError, match="at="):
        df.trace(model, images)
    traced = df.trace(model, (images,), at="backbone.body")
    again = df.trace(model, images, at="backbone.body")  # a list is the single argument
    assert traced.network == again.network
    assert traced.depth == 46
    assert traced.network.layers[0].in_size[0] == 320
    student = df.rewrite(traced, traced.vanilla)
    assert type(student) is type(model)
    with torch.no_grad():
        wanted = model.backbone(torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0)))
        found = student.backbone(torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0)))
    for key in wanted:
        agree(found[key], wanted[key], 1e-5)


def test_two_parts_of_one_model_can_be_merged_one_after_the_other():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = small(), small()

        def forward(self, x):
            x = self.one(x)
            return self.two(x if x.sum() > 0 else -x)

    model, x = Two().double().eval(), image().double()
    first = df.merge(df.rewrite(df.trace(model, x, at="one"), df.Plan((), ())))
    student = df.rewrite(df.trace(first, x, at="two"), df.Plan((), ()))
    shallow = df.merge(student)
    assert sum(isinstance(part, nn.Conv2d) for part in shallow.modules()) == 2
    agree(shallow(x), student(x))


def test_a_merged_network_can_be_traced_again():
    model, x = nn.Sequential(small(), nn.ReLU(), small()).double().eval(), image().double()
    traced = df.trace(model, x)
    shallow = df.merge(df.rewrite(traced, df.Plan((3,), (3,))))
    again = df.trace(shallow, x)
    assert again.depth == 2
    student = df.rewrite(again, df.Plan((), ()))
    agree(df.merge(student)(x), student(x))


def test_a_wrong_at_is_answered_with_what_was_meant():
    with pytest.raises(TraceError, match=r"Detector has no submodule 'backbone.bdy'. Did you mean .*'backbone.body'"):
        df.trace(Detector(), image(), at="backbone.bdy")
    with pytest.raises(TraceError, match=r"It has backbone, backbone.body, "):
        df.trace(Detector(), image(), at="zzz")


def test_at_a_submodule_that_is_never_called():
    model = Net(lambda net, x: net.used(x), used=conv(), unused=small())
    with pytest.raises(TraceError, match="without ever calling at='unused'"):
        df.trace(model, image(), at="unused")


def test_at_with_inputs_on_which_the_model_fails_before():
    with pytest.raises(TraceError, match=r"failed on its example inputs before it reached at='backbone.body'"):
        df.trace(Detector(), (["text"],), at="backbone.body")


@pytest.mark.parametrize(
    ("ignore", "left"),
    [
        ((), ["0", "1.0", "1.1"]),
        (["1"], ["0"]),
        ("0", ["1.0", "1.1"]),
        (["1.*"], ["0"]),
        (["1.?"], ["0"]),
        (["*.1"], ["0", "1.0"]),
        ([nn.Conv2d], []),
        (nn.Conv2d, []),
        ([nn.Conv3d], ["0", "1.0", "1.1"]),
    ],
)
def test_ignore_takes_names_globs_and_types(ignore, left):
    traced = df.trace(nn.Sequential(conv(), nn.Sequential(conv(), conv())), image(), ignore=ignore)
    assert [layer.where for layer in traced.network.layers] == left
    others = {"0", "1.0", "1.1"} - set(left)
    assert all(codes(traced)[where] == "ignored" for where in others)


def test_an_ignored_activation_stays_and_parts_the_chain():
    traced = df.trace(nn.Sequential(conv(), nn.ReLU(), conv()), image(), ignore=[nn.ReLU])
    assert (traced.network.barriers, traced.network.activations) == ((1,), frozenset())
    shallow = df.merge(df.rewrite(traced, df.Plan((), ())))
    assert any(isinstance(part, nn.ReLU) for part in shallow.modules())


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = conv(), conv()

    def forward(self, x, scale=None, mode="plain", factor=2.0, flag=True):
        if scale is not None:
            x = x * scale
        y = self.b(F.relu(self.a(x)))
        return (y * factor if mode == "plain" else y) if flag else x


def test_example_inputs_as_tensor_tuple_and_dict():
    model, x = Named().eval(), image()
    for inputs in (x, (x,), {"x": x}):
        traced = df.trace(model, inputs)
        assert (traced.depth, traced.network.barriers) == (2, ())
        agree(df.rewrite(traced, traced.vanilla)(x), model(x), 1e-6)
        df.merge(df.rewrite(traced, df.Plan((), ())))


def test_an_optional_argument_that_is_given_becomes_an_input():
    model, x = Named().eval(), image()
    scale = torch.full((1,), 3.0)
    for inputs in ((x, scale), {"x": x, "scale": scale}):
        traced = df.trace(model, inputs)
        student = df.rewrite(traced, traced.vanilla)
        agree(student(x, scale), model(x, scale), 1e-6)
        agree(student(x=x, scale=scale), model(x, scale), 1e-6)
        agree(df.merge(df.rewrite(traced, traced.vanilla))(x, scale), model(x, scale), 1e-4)


@pytest.mark.parametrize("default", [(2, 2), [1], {"a": 1}, torch.zeros(1), "text", 3, None, 1.5, True], ids=repr)
def test_optional_arguments_of_every_type_keep_their_defaults(default):
    class Optional(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = conv(), conv()

        def forward(self, x, extra=default):
            return self.b(F.relu(self.a(x)))

    model, x = Optional().eval(), image()
    traced = df.trace(model, x)
    assert traced.depth == 2
    agree(df.rewrite(traced, traced.vanilla)(x), model(x), 1e-6)
    agree(df.merge(df.rewrite(traced, traced.vanilla))(x), model(x), 1e-4)


def test_a_forward_with_a_keyword_only_argument():
    class Keyword(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = conv(), conv()

        def forward(self, x, *, double=False):
            y = self.b(F.relu(self.a(x)))
            return y * 2 if double else y

    model, x = Keyword().eval(), image()
    traced = df.trace(model, x)
    agree(df.rewrite(traced, traced.vanilla)(x), model(x), 1e-6)


def test_a_list_is_the_single_argument():
    model = Net(lambda net, images: net.b(F.relu(net.a(torch.cat([images[0], images[1]])))), a=conv(), b=conv())
    traced = df.trace(model, [image(), image()])
    assert traced.depth == 2


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((), "The example inputs do not fit forward.* of Named: missing a required argument: 'x'"),
        ({"y": 1}, "do not fit forward"),
        ((1, 2, 3, 4, 5, 6), "too many positional arguments"),
        (torch.zeros(1, 3, 8, 8), "The model does not run on its example inputs: .*channels"),
        (torch.zeros(1, 4, 8, 8, dtype=torch.float64), "The model does not run on its example inputs: .*type"),
        ("text", "The model does not run on its example inputs"),
        (torch.zeros(1, 4, 0, 8), "The model does not run on its example inputs"),
    ],
)
def test_inputs_that_do_not_fit_are_a_clear_error(inputs, message):
    with pytest.raises(TraceError, match=message):
        df.trace(Named(), inputs)


@pytest.mark.parametrize("thing", ["resnet18", None, nn.Conv2d, torch.zeros(3)])
def test_what_is_no_module_is_refused(thing):
    with pytest.raises(TraceError, match=r"trace\(\) takes a torch.nn.Module, found"):
        df.trace(thing, image())


def test_a_model_that_is_one_convolution():
    traced = df.trace(conv(), image())
    assert traced.depth <= 1


def fingerprint(model):
    """Everything that a user could see change."""
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
def test_the_users_model_is_left_as_it_is(mode):
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
def test_students_are_in_the_mode_in_which_the_user_had_each_module(mode):
    model = mode(models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=10))
    traced = df.trace(model, torch.randn(1, 3, 64, 64))
    student = df.rewrite(traced, only(traced, 1, 3))
    modes = {name: module.training for name, module in model.named_modules()}
    modules = dict(student.named_modules())
    assert "layer1.0.bn1" in modules
    for name, module in modules.items():
        if name in modes:
            assert module.training is modes[name], name


def test_the_users_model_is_left_alone_by_at_too():
    model = Detector().train()
    model.backbone["body"][1].eval()
    before = fingerprint(model)
    traced = df.trace(model, image(), at="backbone.body")
    student = df.rewrite(traced, df.Plan((), ()))
    df.verify(student, df.merge(student), image())
    same(fingerprint(model), before)
    assert not student.backbone["body"].get_submodule("1").training
    assert student.head.training


def test_changing_the_model_after_tracing_does_not_change_the_network():
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


def keeps_or_says_so(model, x, **given):
    """Either the student computes what the model computes, hooks included, or tracing says that it cannot."""
    try:
        traced = df.trace(model, x, **given)
    except TraceError as error:
        assert "hook" in str(error)
        return
    agree(df.rewrite(traced, traced.vanilla)(x), model(x))


@pytest.mark.parametrize("kind", ["before", "after"])
def test_hooks_on_the_model_itself_are_not_lost_in_silence(kind):
    keeps_or_says_so(hooked(small().double().eval(), kind), image().double())


@pytest.mark.parametrize("kind", ["before", "after"])
def test_hooks_on_the_submodule_at_are_not_lost_in_silence(kind):
    model = Detector().double().eval()
    hooked(model.backbone["body"], kind)
    keeps_or_says_so(model, image().double(), at="backbone.body")


def test_a_model_that_writes_to_its_input_folds_and_leaves_the_example_as_it_was():
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
