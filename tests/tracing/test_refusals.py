"""Everything that cannot be merged is a barrier with a reason."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils import weight_norm as old_weight_norm
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torchvision.ops import SqueezeExcitation

import depthfold as df
from nets import Net, agree, codes, conv, folds_exactly, image, refusal


class Between(nn.Module):
    """Two convolutions with another module between them."""

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
def test_unmergeable_operation_is_a_barrier_with_a_reason(kind):
    part, where, code = REFUSED[kind]
    traced = folds_exactly(Between(part), image())
    assert traced.network.barriers == (1,)
    assert [layer.where for layer in traced.network.layers] == ["before", "after"]
    (found,) = [each for each in traced.network.refusals if each.position == 1]
    assert (found.where, found.code) == (where, code)
    assert traced.network.why_not(df.Span(0, 2)).why.startswith("there is a barrier at 1: ")


@pytest.mark.parametrize("mode", ["reflect", "circular", "replicate"])
@pytest.mark.parametrize("padding", [0, "valid", "same"])
def test_padding_mode_of_a_convolution_that_does_not_pad_is_no_reason(mode, padding):
    """The padding of the other layers moves to the first one, whose mode is then "zeros"."""
    given = dict(kernel=1, padding=padding, padding_mode=mode)
    model = nn.Sequential(conv(**given), nn.ReLU(), conv(), nn.BatchNorm2d(4), nn.ReLU(), conv(**given), conv(stride=2))
    traced = folds_exactly(model, image())
    assert (traced.network.depth, traced.network.barriers) == (4, ())
    student = df.rewrite(traced, df.Plan((), ()))
    for x in (image(9).double(), image(16).double()):
        agree(df.merge(student)(x), student(x))
    vanilla = df.rewrite(traced, traced.vanilla)
    agree(vanilla(image(9).double()), model(image(9).double()))


@pytest.mark.parametrize("before, after", [(0, (1, 1)), (1, (0, 0)), (0, "same")])
def test_padding_that_was_changed_after_the_module_was_made_is_refused(before, after):
    """PyTorch still pads with the widths of before."""
    part = conv(padding=before, padding_mode="reflect")
    part.padding = after
    assert refusal(df.trace(Between(part), image()), "part").code == "padding-mode"


def test_reasons_name_the_cause():
    def why(part):
        return refusal(df.trace(Between(part), image()), "part").why

    assert "'circular'" in why(conv(padding_mode="circular"))
    assert "its forward cannot be traced: symbolically traced variables" in why(ValueFlow())
    assert "test_refusals.py" in why(ValueFlow())
    assert "x.sum() > 0" in why(ValueFlow())
    assert "parametrize" in why(weight_norm(conv()))
    assert "GroupNorm" in why(nn.GroupNorm(2, 4))

    def reason(forward):
        (found,) = (each for each in df.trace(Between(Net(forward)), image()).network.refusals if "mul" in each.where)
        return found.why

    combined = refusal(df.trace(Between(Net(lambda net, x: torch.sub(x, x.abs()))), image()), "part.sub").why
    assert combined == "it combines two maps other than as x + y or x - conv(y) (sub)"
    directly = "it multiplies by a number, which is merged only if it alone reads a convolution or its batch norm"
    assert reason(lambda net, x: x * 0.2) == directly
    assert reason(lambda net, x: x * x.mean((2, 3), keepdim=True)) == "it multiplies by a value or a gate (mul)"


def test_squeeze_and_excite_is_a_barrier_without_layers():
    traced = folds_exactly(Between(SqueezeExcitation(4, 2)), image())
    assert [layer.where for layer in traced.network.layers] == ["before", "after"]
    found = codes(traced)
    assert found["part.avgpool"] == "pooling"
    assert found["part.fc1"] == found["part.fc2"] == "squeeze-excite"
    assert found["part.mul"] == "multiplication"
    assert "part.mul" in refusal(traced, "part.fc1").why


def test_pool_that_takes_its_size_from_the_map_is_squeeze_and_excite():
    def gate(net, x):
        pooled = F.avg_pool2d(x, x.size(2))
        return x * torch.sigmoid(net.fc2(F.relu(net.fc1(pooled))))

    part = Net(gate, fc1=nn.Conv2d(4, 2, 1), fc2=nn.Conv2d(2, 4, 1))
    traced = folds_exactly(Between(part), image())
    assert [layer.where for layer in traced.network.layers] == ["before", "after"]
    assert codes(traced)["part.fc1"] == codes(traced)["part.fc2"] == "squeeze-excite"


def test_scaled_map_after_a_pool_is_not_squeeze_and_excite():
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


def test_input_without_a_batch_dimension_is_refused():
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
    assert (traced.depth, traced.network.barriers) == (4, (2, 3))
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


def test_value_that_is_also_an_output_is_a_barrier():
    model = Net(lambda net, x: (lambda y: (y, net.b(y)))(F.relu(net.a(x))), a=conv(), b=conv())
    traced = df.trace(model, image())
    assert traced.network.barriers == (1,)
    assert ("output", 1) in {(each.code, each.position) for each in traced.network.refusals}
    x = image()
    student = df.rewrite(traced, df.Plan((), ()))
    for found, wanted in zip(df.merge(student.eval())(x), student(x), strict=True):
        agree(found, wanted, 1e-4)


def test_addition_after_the_activation_is_not_a_skip():
    model = Net(lambda net, x: net.b(F.relu(net.a(x)) + x), a=conv(), b=conv())
    traced = folds_exactly(model, image())
    assert (traced.depth, traced.network.skips, traced.network.barriers) == (2, (), (1,))
    assert "addition" in codes(traced).values()


AFTER_ACTIVATION = "an activation (leaky_relu) comes before this addition, and only x + conv(x) is a skip"
ELSEWHERE = "the value is also added elsewhere, and no span can contain that addition"


@pytest.mark.parametrize(
    ("branch", "reason"),
    [
        (lambda net, x: x + F.leaky_relu(net.b(x), 0.1), AFTER_ACTIVATION),
        (lambda net, x: F.leaky_relu(net.norm(net.b(x)), 0.1) + x, AFTER_ACTIVATION),
        (lambda net, x: (lambda y: y + F.leaky_relu(net.b(y)))(F.relu(x)), AFTER_ACTIVATION),
        (lambda net, x: (lambda y: y + net.pool(y))(F.leaky_relu(x)), ELSEWHERE),  # the activation is before the skip
        (lambda net, x: x + net.pool(net.b(x)), ELSEWHERE),
    ],
    ids=["darknet", "norm", "activated skip", "activated skip and pool", "pool"],
)
def test_reason_of_an_addition_names_the_activation_before_it(branch, reason):
    parts = dict(a=conv(), b=conv(), c=conv(), norm=nn.BatchNorm2d(4), pool=nn.MaxPool2d(3, 1, 1))
    traced = df.trace(Net(lambda net, x: net.c(branch(net, net.a(x))), **parts), image())
    assert {each.why for each in traced.network.refusals if each.code == "addition"} == {reason}


def test_pre_activation_residual_is_not_a_skip():
    """Norm and activation are before the convolution, so the skip starts before them."""
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


def test_side_addition_names_the_added_value():
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
def test_combination_of_two_maps_is_not_called_a_broadcast(combine):
    model = Net(lambda net, x: net.b(combine(net.a(x), x)), a=conv(), b=conv())
    traced = folds_exactly(model, image())
    assert traced.network.barriers == (1,)
    assert not any("two maps of the same size" in each.why for each in traced.network.refusals)


def test_complex_weights_are_refused():
    model = nn.Sequential(conv(), conv()).to(torch.complex64)
    traced = df.trace(model, image().to(torch.complex64))
    assert traced.depth == 0
    assert codes(traced)["0"] == "precision"


def test_network_without_convolutions_passes_all_steps():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4 * 12 * 13, 3))
    traced = df.trace(model, image())
    assert (traced.depth, traced.spans("full")) == (0, ())
    assert "nothing to merge" in str(traced)
    student = df.rewrite(traced, traced.vanilla)
    agree(df.merge(student)(image()), model(image()), 1e-6)


def test_only_the_innermost_untraceable_module_is_opaque():
    model = nn.Sequential(conv(), nn.Sequential(nn.Sequential(conv(), ValueFlow()), conv()), nn.ReLU())
    traced = folds_exactly(model, image())
    assert [layer.where for layer in traced.network.layers] == ["0", "1.0.0", "1.1"]
    assert codes(traced)["1.0.1"] == "opaque"
    assert traced.network.barriers == (2,)


def test_refusals_outside_the_chains_have_no_position():
    traced = df.trace(nn.Sequential(nn.MaxPool2d(2), conv(padding_mode="reflect"), nn.ReLU(), nn.Flatten()), image())
    found = refusal(traced, "1")
    assert (found.code, found.position) == ("padding-mode", None)


def test_padding_of_the_channels_is_a_barrier():
    model = nn.Sequential(conv(), nn.ConstantPad3d((0, 0, 0, 0, 1, 1), 0.0), nn.Conv2d(6, 4, 3))
    traced = folds_exactly(model, image())
    assert traced.network.barriers == (1,)
