"""The arguments of trace(), and its errors."""

import functools
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision import models

import depthfold as df
from depthfold.errors import TraceError
from nets import Net, agree, codes, conv, image


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


def test_untraceable_forward_is_an_error_with_its_line():
    with pytest.raises(TraceError) as error:
        df.trace(Detector(), image())
    message = str(error.value)
    assert "The forward of Detector cannot be traced" in message
    assert "test_arguments.py:" in message
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


def test_at_traces_the_backbone_of_a_detection_model():
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


def test_two_submodules_of_one_model_can_be_merged_in_turn():
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


def test_merged_network_can_be_traced_again():
    model, x = nn.Sequential(small(), nn.ReLU(), small()).double().eval(), image().double()
    traced = df.trace(model, x)
    shallow = df.merge(df.rewrite(traced, df.Plan((3,), (3,))))
    again = df.trace(shallow, x)
    assert again.depth == 2
    student = df.rewrite(again, df.Plan((), ()))
    agree(df.merge(student)(x), student(x))


def test_wrong_at_gets_a_suggestion():
    with pytest.raises(TraceError, match=r"Detector has no submodule 'backbone.bdy'. Did you mean .*'backbone.body'"):
        df.trace(Detector(), image(), at="backbone.bdy")
    with pytest.raises(TraceError, match=r"It has backbone, backbone.body, "):
        df.trace(Detector(), image(), at="zzz")


def test_at_with_the_second_name_of_a_module_says_what_to_delete():
    model = Net(lambda net, x: net.body(x), backbone=small())
    model.body = model.backbone
    for path in ("body", "body.0"):
        first = path.replace("body", "backbone")
        with pytest.raises(TraceError) as error:
            df.trace(model, image(), at=path)
        assert str(error.value) == (
            f"{path!r} is the same module as {first!r}, and layers with two names cannot be merged. Delete the "
            "attribute that the forward of Net does not use, and trace the other one."
        )
    assert df.trace(model, image(), at="backbone").depth == 0
    del model.backbone
    assert df.trace(model, image(), at="body").depth == 3


def test_at_must_be_a_submodule_that_is_called():
    model = Net(lambda net, x: net.used(x), used=conv(), unused=small())
    with pytest.raises(TraceError, match="does not call at='unused'"):
        df.trace(model, image(), at="unused")


def test_at_with_inputs_on_which_the_model_fails():
    with pytest.raises(TraceError, match=r"failed on its example inputs before it called at='backbone.body'"):
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


def test_ignored_activation_stays_and_splits_the_chain():
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


def test_example_inputs_may_be_a_tensor_a_tuple_or_a_dict():
    model, x = Named().eval(), image()
    for inputs in (x, (x,), {"x": x}):
        traced = df.trace(model, inputs)
        assert (traced.depth, traced.network.barriers) == (2, ())
        agree(df.rewrite(traced, traced.vanilla)(x), model(x), 1e-6)
        df.merge(df.rewrite(traced, df.Plan((), ())))


def test_optional_argument_that_is_passed_becomes_an_input():
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


def test_forward_with_a_keyword_only_argument():
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


def test_list_is_a_single_argument():
    model = Net(lambda net, images: net.b(F.relu(net.a(torch.cat([images[0], images[1]])))), a=conv(), b=conv())
    traced = df.trace(model, [image(), image()])
    assert traced.depth == 2


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((), "The example inputs do not match forward.* of Named: missing a required argument: 'x'"),
        ({"y": 1}, "do not match forward"),
        ((1, 2, 3, 4, 5, 6), "too many positional arguments"),
        (torch.zeros(1, 3, 8, 8), "The model does not run on its example inputs: .*channels"),
        (torch.zeros(1, 4, 8, 8, dtype=torch.float64), "The model does not run on its example inputs: .*type"),
        ("text", "The model does not run on its example inputs"),
        (torch.zeros(1, 4, 0, 8), "The model does not run on its example inputs"),
    ],
)
def test_inputs_that_do_not_match_are_refused(inputs, message):
    with pytest.raises(TraceError, match=message):
        df.trace(Named(), inputs)


@pytest.mark.parametrize("thing", ["resnet18", None, nn.Conv2d, torch.zeros(3)])
def test_anything_but_a_module_is_refused(thing):
    with pytest.raises(TraceError, match=r"trace\(\) takes a torch.nn.Module, found"):
        df.trace(thing, image())


def test_model_that_is_a_single_convolution():
    traced = df.trace(conv(), image())
    assert traced.depth <= 1


@pytest.mark.parametrize(
    ("ignore", "message"),
    [
        (["blok.*"], r"ignore='blok.\*' matches no module of Sequential. It has 0, 1, 2"),
        (["block.0"], "ignore='block.0' matches no module"),
        ([3], "ignore takes names, globs and module types, found 3"),
    ],
)
def test_invalid_ignore_is_refused(ignore, message):
    with pytest.raises(TraceError, match=message):
        df.trace(nn.Sequential(conv(), nn.ReLU(), conv()), image(), ignore=ignore)


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (nn.DataParallel, r"wrapped in DataParallel. Unwrap it: trace\(model.module"),
        (torch.jit.script, "Trace the module from which it was scripted"),
    ],
)
def test_wrapped_model_is_refused(wrap, message):
    with pytest.raises(TraceError, match=message):
        df.trace(wrap(nn.Sequential(conv(), conv())), image())


def test_lazy_module_without_weights_is_refused():
    model = nn.Sequential(conv(), nn.ReLU(), nn.LazyConv2d(4, 3))
    with pytest.raises(TraceError, match=r"^2 has no weights yet\. Run the model once before trace\(\)\.$"):
        df.trace(model, image())
    model(image())
    assert df.trace(model.eval(), image()).depth == 2


@pytest.mark.parametrize(
    "compiled",
    [
        torch.jit.script,
        lambda module: torch.jit.trace(module, image(4)),
        lambda module: torch.jit.freeze(torch.jit.script(module.eval())),
    ],
)
@pytest.mark.parametrize("arguments", [{}, {"ignore": "1"}, {"at": "2"}])
def test_scripted_submodule_with_weights_is_refused_also_if_it_is_ignored_or_outside(compiled, arguments):
    model = nn.Sequential(conv(), nn.Sequential(conv()), nn.Sequential(conv(), conv())).eval()
    model[1] = compiled(model[1])
    with pytest.raises(TraceError, match=r"^'1' is a ScriptModule, .*\. Use the module from which it was scripted\.$"):
        df.trace(model, image(), **arguments)


class Scripted(torch.jit.ScriptModule):
    """A block whose author had it compiled."""

    def __init__(self):
        super().__init__()
        self.inner = conv()

    @torch.jit.script_method
    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("model", [Scripted(), nn.Sequential(conv(), Scripted())])
def test_class_that_derives_from_a_script_module_is_refused_with_the_fix(model):
    message = (
        r"ScriptModule.*\. Derive Scripted from torch\.nn\.Module instead, and remove script_method from its forward\.$"
    )
    with pytest.raises(TraceError, match=message):
        df.trace(model.eval(), image())


def test_scripted_submodule_without_weights_is_part_of_the_network():
    model = nn.Sequential(conv(), torch.jit.script(nn.Softplus(beta=2)), conv()).eval()
    shallow = df.merge(df.rewrite(traced := df.trace(model, image()), traced.network.vanilla))
    assert traced.depth == 2
    agree(shallow(image()), model(image()), 1e-5)


def test_context_of_a_forward_is_named_as_the_reason():
    class Autocast(Net):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.b(F.relu(self.a(x))).float()

    with pytest.raises(
        TraceError, match=r"its forward enters a context such as autocast \(test_arguments.py:\d+, `with"
    ):
        df.trace(Autocast(None, a=conv(), b=conv()).eval(), image())


@pytest.mark.parametrize("default", [False, True], ids=["one argument", "argument with a default"])
def test_forward_that_was_replaced_on_the_model(default):
    """As the package pretrainedmodels does with the networks of torchvision."""

    def forward(net, x):
        return net.b(F.relu(net.a(x)))

    def forward_with_default(net, x, scale=2):
        return net.b(F.relu(net.a(x))) * scale

    model = Net(None, a=conv(), b=conv())  # its own forward would fail
    model.forward = MethodType(forward_with_default if default else forward, model)
    traced = df.trace(model, image())
    assert traced.depth == 2
    with torch.no_grad():
        agree(df.merge(df.rewrite(traced, traced.vanilla))(image(seed=1)), model(image(seed=1)), tolerance=1e-5)


@pytest.mark.parametrize("wrap", [torch.no_grad(), torch.inference_mode()], ids=["no_grad", "inference_mode"])
def test_wrapped_forward_that_was_set_on_the_model(wrap):
    """The wrapper calls the model itself, but trace records a copy."""
    model = Net(lambda net, x: net.b(F.relu(net.a(x))), a=conv(), b=conv())
    model.forward = wrap(model.forward)
    assert df.trace(model, image()).depth == 2


def test_replaced_forward_that_takes_arguments_of_its_own():
    model = Net(None, a=conv(), b=conv())
    model.forward = functools.partial(lambda net, x: net.b(F.relu(net.a(x))), model)
    assert df.trace(model, image()).depth == 2


def test_submodule_that_cannot_be_traced_after_it_has_written_to_its_list():
    """As the head of YOLOv5 does."""

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList([conv(), conv()])

        def forward(self, maps, named):
            for n, each in enumerate(self.convs):
                maps[n] = each(maps[n])
            named["sum"] = maps[0] + maps[1] + named["first"]
            named["inner"][0] = named["first"] = named["sum"]
            return named["sum"] if float(maps[0].mean()) < 1e9 else maps[1]

    def forward(net, x):
        return net.head([net.b(F.relu(net.a(x))), x], {"first": x, "inner": [x]})

    model = Net(forward, a=conv(), b=conv(), head=Head()).eval()
    traced = df.trace(model, image())
    assert traced.depth == 2
    assert codes(traced)["head"] == "opaque"
    with torch.no_grad():
        agree(df.merge(df.rewrite(traced, traced.vanilla))(image(seed=1)), model(image(seed=1)), tolerance=1e-5)


def test_list_that_contains_itself_as_an_argument_of_a_submodule():
    def forward(net, x):
        values = [x]
        values.append(values)
        return net.part(values)

    part = Net(lambda net, values: net.b(F.relu(net.a(values[0]))), a=conv(), b=conv())
    assert df.trace(Net(forward, part=part), image()).depth == 2
