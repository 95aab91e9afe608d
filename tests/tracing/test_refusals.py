"""Whatever cannot be merged is a barrier with a reason: one small network for each."""

from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils import weight_norm as old_weight_norm
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torchvision.ops import SqueezeExcitation

import depthfold as df
from depthfold.errors import TraceError
from nets import Net, Opaque, agree, codes, conv, folds_exactly, image, refusal


class Between(nn.Module):
    """A convolution, something in the way, a convolution."""

    def __init__(self, part):
        super().__init__()
        self.before, self.part, self.after = conv(), part, conv()

    def forward(self, x):
        return self.after(self.part(F.relu(self.before(x))))


class Unknown(nn.Module):
    def forward(self, x):
        return torch.fft.fft(x).real


class Standardised(nn.Conv2d):
    def forward(self, x):
        weight = (self.weight - self.weight.mean()) / self.weight.std()
        return F.conv2d(x, weight, self.bias, padding=self.padding)


class ValueFlow(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = conv()

    def forward(self, x):
        return self.conv(x) if x.sum() > 0 else x


REFUSED = {
    "max pool": (nn.MaxPool2d(2), "part", "pooling"),
    "average pool": (nn.AvgPool2d(3, 1, 1), "part", "pooling"),
    "functional pool": (Net(lambda net, x: F.max_pool2d(x, 2)), "part.max_pool2d", "pooling"),
    "mean": (Net(lambda net, x: x.mean((2, 3), keepdim=True)), "part.mean", "pooling"),
    "circular padding": (conv(padding_mode="circular"), "part", "padding-mode"),
    "reflecting padding": (conv(padding_mode="reflect"), "part", "padding-mode"),
    "transposed": (nn.ConvTranspose2d(4, 4, 2, stride=2), "part", "transposed"),
    "layer norm": (nn.LayerNorm(13), "part", "normalisation"),
    "group norm": (nn.GroupNorm(2, 4), "part", "normalisation"),
    "instance norm": (nn.InstanceNorm2d(4), "part", "normalisation"),
    "functional layer norm": (Net(lambda net, x: F.layer_norm(x, (13,))), "part.layer_norm", "normalisation"),
    "upsampling": (nn.Upsample(scale_factor=2), "part", "resize"),
    "interpolation": (Net(lambda net, x: F.interpolate(x, scale_factor=2)), "part.interpolate", "resize"),
    "weight norm": (weight_norm(conv()), "part", "parametrised"),
    "spectral norm": (spectral_norm(conv()), "part", "parametrised"),
    "old weight norm": (old_weight_norm(conv()), "part", "hooked"),
    "old spectral norm": (old_spectral_norm(conv()), "part", "hooked"),
    "custom operation": (Unknown(), "part.fft_fft", "custom"),
    "weight standardisation": (Standardised(4, 4, 3, padding=1), "part.conv2d", "computed-weights"),
    "control flow on values": (ValueFlow(), "part", "opaque"),
    "scaling": (Net(lambda net, x: x * 0.5), "part.mul", "multiplication"),
    "constant": (Net(lambda net, x: x + 1), "part.add", "broadcast"),
    "turning round": (Net(lambda net, x: x.flip(1)), "part.flip", "custom"),
    "shuffle": (nn.ChannelShuffle(2), "part", "split"),
    "softmax": (nn.Softmax2d(), "part", "attention"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_merged_is_a_barrier_with_a_reason(kind):
    part, where, code = REFUSED[kind]
    traced = folds_exactly(Between(part), image())
    assert traced.network.barriers == (1,)
    assert [layer.where for layer in traced.network.layers] == ["before", "after"]
    (found,) = [each for each in traced.network.refusals if each.position == 1]
    assert (found.where, found.code) == (where, code)
    assert traced.network.why_not(df.Span(0, 2)).why.startswith("there is a barrier at 1: ")


def test_reasons_name_what_was_found():
    def why(part):
        return refusal(df.trace(Between(part), image()), "part").why

    assert "'circular'" in why(conv(padding_mode="circular"))
    assert "its forward cannot be traced: symbolically traced variables" in why(ValueFlow())
    assert "test_refusals.py" in why(ValueFlow())
    assert "x.sum() > 0" in why(ValueFlow())
    assert "parametrize" in why(weight_norm(conv()))
    assert "GroupNorm" in why(nn.GroupNorm(2, 4))


def test_squeeze_and_excite_is_a_barrier_and_its_convolutions_are_no_layers():
    traced = folds_exactly(Between(SqueezeExcitation(4, 2)), image())
    assert [layer.where for layer in traced.network.layers] == ["before", "after"]
    found = codes(traced)
    assert found["part.avgpool"] == "pooling"
    assert found["part.fc1"] == found["part.fc2"] == "squeeze-excite"
    assert found["part.mul"] == "multiplication"
    assert "part.mul" in refusal(traced, "part.fc1").why


def test_a_map_that_is_scaled_after_a_pool_is_no_squeeze_and_excite():
    model = Net(
        lambda net, x: net.c(F.relu(net.b(F.relu(net.a(F.max_pool2d(x, 2)))) * net.gamma)),
        a=conv(),
        b=conv(),
        c=conv(),
        gamma=nn.Parameter(torch.full((4, 1, 1), 0.3)),
    )
    traced = folds_exactly(model, image())
    assert [layer.where for layer in traced.network.layers] == ["a", "b", "c"]
    assert traced.network.barriers == (2,)


def test_a_module_used_twice_is_refused_with_the_number_of_calls():
    model = Net(lambda net, x: net.b(F.relu(net.a(F.relu(net.a(x))))), a=conv(), b=conv())
    traced = folds_exactly(model, image())
    assert [layer.where for layer in traced.network.layers] == ["b"]
    assert codes(traced)["a"] == "used-twice"
    assert "called 2 times" in refusal(traced, "a").why


def test_a_batch_norm_used_twice_is_refused():
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


def test_an_activation_used_twice_is_no_obstacle():
    model = Net(lambda net, x: net.c(net.act(net.b(net.act(net.a(x))))), a=conv(), b=conv(), c=conv(), act=nn.PReLU())
    assert folds_exactly(model, image()).network.barriers == ()


@pytest.mark.parametrize("name", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_convolution_with_hooks_is_refused(name):
    model = Between(conv())
    getattr(model.part, name)(lambda *given: None)
    traced = df.trace(model, image())
    assert traced.network.barriers == (1,)
    assert codes(traced)["part"] == "hooked"


@pytest.mark.parametrize("module", [nn.Dropout(0.1), nn.Identity()], ids=["dropout", "identity"])
def test_a_module_that_does_nothing_is_not_seen_through_when_a_hook_changes_its_output(module):
    module.register_forward_hook(lambda part, given, output: output * 2)
    traced = folds_exactly(Between(module), image())
    assert traced.network.barriers == (1,)


def doubled(part, x):
    return F.conv2d(x, 2 * part.weight, part.bias, padding=1)


def test_a_convolution_whose_forward_was_replaced_on_the_object_is_refused():
    part = conv()
    part.forward = MethodType(doubled, part)
    traced = folds_exactly(Between(part), image())
    assert [layer.where for layer in traced.network.layers] == ["before", "after"]
    assert codes(traced)["part"] == "custom-convolution"


def test_a_batch_norm_whose_forward_was_replaced_on_the_object_is_refused():
    norm = nn.BatchNorm2d(4)
    norm.forward = MethodType(lambda part, x: x * 2, norm)
    traced = folds_exactly(nn.Sequential(conv(), norm, conv()), image())
    assert traced.network.barriers == (1,)
    assert codes(traced)["1"] == "custom-norm"


def test_a_convolution_whose_weight_is_read_elsewhere_keeps_its_weight():
    model = Net(
        lambda net, x: net.b(F.relu(net.a(x))) + F.conv2d(x, net.a.weight, padding=1), a=conv(), b=conv(), c=conv()
    )
    folds_exactly(model, image())


def relu_as_a_statement(net, x):
    y = net.a(x)
    F.relu_(y)
    return net.b(y)


def module_as_a_statement(net, x):
    y = net.a(x)
    net.act(y)
    return net.b(y)


def addition_as_a_statement(net, x):
    y = net.b(F.relu(net.a(x)))
    y.add_(x)
    return net.c(y)


def clone_before_writing(net, x):
    y = net.a(x)
    kept = y.clone()
    return net.c(net.b(F.relu_(y)) + kept)


def overwritten_skip(net, x):
    y = net.a(x)
    return net.c(net.b(F.relu_(y)) + y)


@pytest.mark.parametrize(
    "run",
    [relu_as_a_statement, module_as_a_statement, addition_as_a_statement, clone_before_writing, overwritten_skip],
    ids=lambda run: run.__name__.replace("_", " "),
)
def test_code_that_writes_in_place_folds_to_what_it_computes(run):
    folds_exactly(Net(run, a=conv(), b=conv(), c=conv(), act=nn.ReLU(inplace=True)), image())


def test_an_input_without_a_batch_dimension_is_refused():
    traced = df.trace(nn.Sequential(conv(), nn.ReLU(), conv()), image()[0])
    assert traced.depth == 0
    assert codes(traced)["0"] == "unbatched"
    assert "3 dimensions instead of 4" in refusal(traced, "0").why


def test_concatenation_is_a_barrier_and_both_branches_are_chains():
    model = Net(
        lambda net, x: net.d(torch.cat([net.b(F.relu(net.a(x))), net.c(x)], 1)),
        a=conv(),
        b=conv(),
        c=conv(kernel=5),
        d=conv(8, 4),
    )
    traced = folds_exactly(model, image())
    assert [(span.i, span.j) for span in traced.network.chains] == [(0, 2), (2, 3), (3, 4)]
    assert "concatenation" in codes(traced).values()


def test_two_convolutions_that_read_one_value_end_the_chain():
    model = Net(
        lambda net, x: (lambda y: torch.cat([net.b(y), net.c(y)], 1))(F.relu(net.a(x))), a=conv(), b=conv(), c=conv()
    )
    traced = folds_exactly(model, image())
    assert traced.network.barriers == (1, 2)
    (found,) = [each for each in traced.network.refusals if each.code == "branches"]
    assert found.position == 1
    assert "2 convolutions read this value: b, c" in found.why


def test_a_value_that_is_also_an_output_is_a_barrier():
    model = Net(lambda net, x: (lambda y: (y, net.b(y)))(F.relu(net.a(x))), a=conv(), b=conv())
    traced = df.trace(model, image())
    assert traced.network.barriers == (1,)
    assert ("output", 1) in {(each.code, each.position) for each in traced.network.refusals}
    x = image()
    student = df.rewrite(traced, df.Plan((), ()))
    for found, wanted in zip(df.merge(student.eval())(x), student(x), strict=True):
        agree(found, wanted, 1e-4)


def test_an_addition_after_the_activation_is_no_skip():
    model = Net(lambda net, x: net.b(F.relu(net.a(x)) + x), a=conv(), b=conv())
    traced = folds_exactly(model, image())
    assert (traced.depth, traced.network.skips, traced.network.barriers) == (2, (), (1,))
    assert "addition" in codes(traced).values()


def test_a_residual_around_activations_before_convolutions():
    """Pre-activation: norm and activation stand before the convolution, so the skip starts before them."""
    model = Net(
        lambda net, x: (lambda y: net.d(y + net.c(F.relu(net.norm(net.b(F.relu(net.n0(y))))))))(net.a(x)),
        a=conv(),
        n0=nn.BatchNorm2d(4),
        b=conv(),
        norm=nn.BatchNorm2d(4),
        c=conv(),
        d=conv(),
    )
    traced = folds_exactly(model, image())
    assert [layer.where for layer in traced.network.layers] == ["a", "b", "c", "d"]
    assert traced.network.barriers == (1, 3)
    assert traced.network.skips == ()
    assert {each.code for each in traced.network.refusals if each.position == 1} == {"norm-alone", "addition"}
    assert {each.code for each in traced.network.refusals if each.position == 3} == {"side-addition"}


def test_an_addition_of_an_unrelated_value_is_a_side_addition_that_names_it():
    model = Net(
        lambda net, x: net.c(net.b(F.relu(net.a(x))) + net.pool(x)),
        a=conv(),
        b=conv(),
        c=conv(),
        pool=nn.MaxPool2d(3, 1, 1),
    )
    traced = folds_exactly(model, image())
    assert traced.network.barriers == (2,)
    (found,) = [each for each in traced.network.refusals if each.code == "side-addition"]
    assert "it adds pool" in found.why


@pytest.mark.parametrize("combine", [lambda a, b: a - b, lambda a, b: torch.add(a, b, alpha=2)], ids=["a - b", "alpha"])
def test_a_combination_of_two_maps_of_one_size_is_not_called_a_broadcast(combine):
    model = Net(lambda net, x: net.b(combine(net.a(x), x)), a=conv(), b=conv())
    traced = folds_exactly(model, image())
    assert traced.network.barriers == (1,)
    assert not any("no two maps of one size" in each.why for each in traced.network.refusals)


def test_complex_weights_are_refused():
    model = nn.Sequential(conv(), conv()).to(torch.complex64)
    traced = df.trace(model, image().to(torch.complex64))
    assert traced.depth == 0
    assert codes(traced)["0"] == "precision"


def test_a_network_without_convolutions_says_so_and_runs_through_all_steps():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4 * 12 * 13, 3))
    traced = df.trace(model, image())
    assert (traced.depth, traced.spans("full")) == (0, ())
    assert "nothing to merge" in str(traced)
    student = df.rewrite(traced, traced.vanilla)
    agree(df.merge(student)(image()), model(image()), 1e-6)


def test_only_the_innermost_module_that_cannot_be_traced_is_opaque():
    model = nn.Sequential(conv(), nn.Sequential(nn.Sequential(conv(), ValueFlow()), conv()), nn.ReLU())
    traced = folds_exactly(model, image())
    assert [layer.where for layer in traced.network.layers] == ["0", "1.0.0", "1.1"]
    assert codes(traced)["1.0.1"] == "opaque"
    assert traced.network.barriers == (2,)


def test_refusals_outside_the_chains_are_listed_without_a_position():
    traced = df.trace(nn.Sequential(nn.MaxPool2d(2), conv(padding_mode="reflect"), nn.ReLU(), nn.Flatten()), image())
    found = refusal(traced, "1")
    assert (found.code, found.position) == ("padding-mode", None)


def test_a_pad_over_more_than_the_map_is_no_padding_of_a_convolution():
    model = nn.Sequential(conv(), nn.ConstantPad3d((0, 0, 0, 0, 1, 1), 0.0), nn.Conv2d(6, 4, 3))
    traced = folds_exactly(model, image())
    assert traced.network.barriers == (1,)


def test_a_convolution_that_an_opaque_module_uses_too_is_no_layer():
    shared = conv()
    model = Net(lambda net, x: net.o(net.b(F.relu(net.a(x)))), a=conv(), b=shared, o=Opaque(shared))
    traced = folds_exactly(model, image())
    assert codes(traced)["b"] == "used-twice"


def test_a_module_that_the_rest_of_the_model_uses_too_is_no_layer():
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


def overwritten_after_the_first_layer(net, x):
    y = net.a(x)
    r = F.relu_(x)
    return torch.cat([net.b(F.relu(y)), r], 1)


def overwritten_before_it_is_added(net, x):
    y = net.a(x)
    r = F.relu_(x)
    return torch.cat([y + x, r], 1)


def added_in_place_and_read_later(net, x):
    y = net.a(x)
    w = net.b(F.relu(y))
    z = torch.cat([w, y], 1)
    w += x
    return torch.cat([z, w], 1)


@pytest.mark.parametrize(
    "run", [overwritten_after_the_first_layer, overwritten_before_it_is_added, added_in_place_and_read_later]
)
def test_values_that_are_overwritten(run):
    model = Net(run, a=conv(), b=conv()).double().eval()
    traced = df.trace(model, image().double())
    for plan in (traced.vanilla, df.Plan((), traced.network.barriers)):
        student = df.rewrite(traced, plan)
        agree(df.merge(student)(image().double()), student(image().double()))
    agree(df.rewrite(traced, traced.vanilla)(image().double()), model(image().double()))


@pytest.mark.parametrize(
    ("ignore", "message"),
    [
        (["blok.*"], r"ignore='blok.\*' matches no module of Sequential. It has 0, 1, 2"),
        (["block.0"], "ignore='block.0' matches no module"),
        ([3], "ignore takes names, globs and module types, found 3"),
    ],
)
def test_what_cannot_be_ignored_is_an_error(ignore, message):
    with pytest.raises(TraceError, match=message):
        df.trace(nn.Sequential(conv(), nn.ReLU(), conv()), image(), ignore=ignore)


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (nn.DataParallel, r"wrapped in DataParallel. Take it off: trace\(model.module"),
        (torch.jit.script, "Trace the module it was made of"),
    ],
)
def test_wrappers_must_be_taken_off(wrap, message):
    with pytest.raises(TraceError, match=message):
        df.trace(wrap(nn.Sequential(conv(), conv())), image())
