"""Common code of published models that older versions refused."""

from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import weight_norm as old_weight_norm
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.prune import l1_unstructured, random_unstructured

import depthfold as df
from depthfold.errors import PlanError, TraceError
from depthfold.testing import random_plan, randomise_statistics
from depthfold.vision import import_timm
from nets import Net, agree, codes, conv, folds_exactly, image, refusal


def run(traced, *given):
    with torch.no_grad():
        return traced(*given)


def vanilla(model, *given, at=None):
    """Compare the merged vanilla plan with the model. Return the network."""
    model = model.double().eval()
    given = tuple(x.double() for x in given)
    traced = df.trace(model, given, at=at)
    student = df.rewrite(traced, traced.vanilla)
    assert set(student.state_dict()) <= set(model.state_dict())
    agree(run(df.merge(student), *given), run(model, *given))
    return traced


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = conv(), conv()


class Starred(Pair):
    def forward(self, x, *args, scale=None, **kwargs):
        return self.predict(x, *args, **kwargs)

    def predict(self, x, y=None, flip=False):
        x = self.b(F.relu(self.a(x)))
        return x if y is None else x + y


def test_forward_with_any_number_of_arguments():
    assert vanilla(Starred(), image()).depth == 2
    assert vanilla(Starred(), image(), image(seed=1)).depth == 2


def test_argument_after_one_that_is_not_passed():
    class Optional(Pair):
        def forward(self, x, mask=None, y=None):
            x = self.b(self.a(x))
            return (x if mask is None else x * mask) + y

    model = Optional().double().eval()
    traced = df.trace(model, {"x": image().double(), "y": image(seed=1).double()})
    found = run(df.merge(df.rewrite(traced, traced.vanilla)), image().double(), image(seed=1).double())
    agree(found, run(model, image().double(), None, image(seed=1).double()))


class Checks(Pair):
    def forward(self, x):
        h, w = x.shape[-2:]
        if h % 4 or w % 4 != 0:
            raise ValueError(f"a multiple of 4 is expected, not {h}x{w}")
        assert x.shape[1] == 4
        return self.b(F.relu(self.a(x)))


def test_conditions_on_sizes_are_decided_and_asserted():
    square = torch.randn(1, 4, 12, 16)
    traced = vanilla(Checks(), square)
    assert (traced.depth, traced.network.barriers) == (2, ())
    student = df.rewrite(traced, traced.vanilla)
    for made in (student, df.merge(student)):
        made(torch.randn(1, 4, 8, 8).double())
        with pytest.raises(AssertionError, match="depends on the size of a value"):
            made(torch.randn(1, 4, 9, 8).double())


def test_conditions_on_values_are_refused():
    class Asks(Pair):
        def forward(self, x):
            return self.b(x) if x.sum().item() > 0 else self.a(x)

    with pytest.raises(TraceError, match="control flow"):
        df.trace(Asks(), image())


def test_channel_chunks_in_a_list():
    def split(net, x):
        parts = list(net.a(x).chunk(2, 1))
        parts.extend(layer(parts[-1]) for layer in net.rest)
        return torch.cat(parts, 1)

    model = Net(split, a=conv(), rest=nn.ModuleList([conv(2, 2), conv(2, 2)]))
    assert vanilla(model, image()).depth == 3


def test_number_of_parts_is_asserted():
    """The number of parts depends on the size."""
    model = Net(lambda net, x: net.b(sum(net.a(part) for part in x.split(4, 2))), a=conv(), b=conv())
    traced = vanilla(model, image())
    merged = df.merge(df.rewrite(traced, traced.vanilla))
    with pytest.raises(AssertionError, match="whose number depends on its size"):
        merged(image(16).double())


class Residual(Pair):
    """A block that creates its activation when it is called."""

    def forward(self, x):
        return nn.ReLU(inplace=True)(self.b(nn.Sequential(nn.ReLU(), nn.Dropout().eval())(self.a(x))) + x)


def test_activation_that_the_forward_creates_is_part_of_a_layer():
    traced = folds_exactly(nn.Sequential(Residual(), Residual(), conv()), image())
    assert (traced.network.barriers, len(traced.network.skips)) == ((), 2)
    assert [layer.activation for layer in traced.network.layers] == ["relu"] * 4 + [None]


def test_weights_that_are_not_in_a_submodule_are_refused_with_the_fix():
    hidden = [conv()]  # a plain list registers nothing
    traced = df.trace(nn.Sequential(conv(), Net(lambda net, x: hidden[0](net.a(x)), a=conv()), conv()), image())
    assert [refusal.code for refusal in traced.network.refusals if refusal.position] == ["opaque"]
    assert refusal(traced, "1").why.startswith(
        "its forward cannot be traced: it calls a Conv2d that is not a submodule, so assign that to an attribute, or "
        "put it into an nn.ModuleList instead of a list (test_"
    )


def test_none_beside_a_value_stays_none():
    class Opaque(nn.Module):
        def __init__(self):
            super().__init__()
            self.c = conv()

        def forward(self, x):
            return (x, x) if x.sum() > 1e9 else (self.c(x), None)

    def skip(net, x):
        y, other = net.a(x)
        return net.b(y) if other is None else net.b(y) + other

    traced = vanilla(Net(skip, a=Opaque(), b=conv()), image())
    assert traced.depth == 1
    merged = df.merge(df.rewrite(traced, traced.vanilla))
    with pytest.raises(AssertionError, match="A module returned None for the traced inputs"):
        merged(image().double() + 1e9)


def test_constants_and_non_persistent_buffers_are_not_in_the_state_dict():
    class Constants(Pair):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(1, 1, 1, 1), persistent=False)
            self.register_buffer("shift", torch.ones(1, 4, 1, 1))
            self.plain = torch.full((1,), 2.0).double()

        def forward(self, x):
            return self.b(self.a(x) * self.scale + self.shift) * self.plain + torch.tensor(2.0)

    traced = vanilla(Constants(), image())
    names = {"shift", "a.weight", "a.bias", "b.weight", "b.bias"}
    assert set(df.rewrite(traced, traced.vanilla).state_dict()) == names
    assert set(df.merge(df.rewrite(traced, traced.vanilla)).state_dict()) == names


def test_merged_kernel_does_not_change_the_memory_layout():
    def flat(net, x):
        y = net.b(F.relu(net.a(x)))
        return y.view(y.size(0), -1)

    traced = vanilla(Net(flat, a=conv(kernel=1), b=conv(kernel=1)), image())
    merged = df.merge(df.rewrite(traced, df.Plan((), ())))
    assert merged(image().double()).shape == (2, 4 * 12 * 13)


class AlwaysTraining(nn.Dropout):
    def train(self, mode=True):
        return super().train(True)


def test_module_that_stays_in_training_mode_is_a_barrier():
    model = nn.Sequential(conv(), nn.ReLU(), AlwaysTraining(0.5), conv()).double().eval()
    traced = df.trace(model, image().double())
    assert codes(traced)["2"] == "training-mode"
    merged = df.merge(df.rewrite(traced, traced.vanilla))
    torch.manual_seed(1)
    found = run(merged, image().double())
    torch.manual_seed(1)
    agree(found, run(model, image().double()))


def test_attributes_that_the_rest_of_the_model_reads_are_refused():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(conv(), nn.ReLU(), conv())
            self.body.out_channels = 4

        def forward(self, x):
            return self.body(x) * self.body.out_channels

    with pytest.raises(TraceError, match=r"no attribute 'out_channels'.*Let the forward of that part return"):
        df.trace(Whole(), image(), at="body")


@pytest.mark.parametrize(
    ("part", "call"),
    [
        (spectral_norm(conv()), "remove_parametrizations(module, 'weight')"),
        (old_weight_norm(conv()), "remove_weight_norm(module)"),
        (torch.nn.utils.spectral_norm(conv()), "remove_spectral_norm(module)"),
        (l1_unstructured(conv(), "weight", 0.5), "torch.nn.utils.prune.remove(module, 'weight')"),
        (l1_unstructured(random_unstructured(conv(), "bias", 0.5), "bias", 0.9), "prune.remove(module, 'bias')"),
    ],
)
def test_refusals_of_computed_weights_name_the_fix(part, call):
    traced = df.trace(nn.Sequential(conv(), nn.ReLU(), part), image())
    (why,) = [refusal.why for refusal in traced.network.refusals if refusal.where == "2"]
    assert call in why


def test_kernel_of_gigabytes_is_refused_before_it_is_computed():
    wide = [nn.Conv2d(2048, 2048, 3, padding=1, device="meta") for _ in range(3)]
    traced = df.trace(nn.Sequential(*wide), torch.empty(1, 2048, 8, 8, device="meta"))
    message = r"merges \(0, 3\], and it would be a convolution 7x7, 2048 -> 2048 of 1.5 GiB in float64.* Add cuts"
    with pytest.raises(PlanError, match=message):
        df.rewrite(traced, df.Plan((), ()))
    df.rewrite(traced, df.Plan((), (1,)))


@pytest.mark.slow
@pytest.mark.parametrize(("ported", "plain"), [("tf_efficientnet_lite0", "efficientnet_lite0")])
def test_network_ported_from_tensorflow_has_the_layers_of_the_original(ported, plain):
    timm = import_timm()
    x = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    model = randomise_statistics(timm.create_model(ported).double()).eval()
    traced, other = df.trace(model, x), df.trace(timm.create_model(plain).double(), x)
    assert traced.depth == other.depth == 49
    for space in ("paper", "full"):
        assert traced.spans(space) == other.spans(space)
    assert [layer.shape.stride for layer in traced.network.layers] == [
        layer.shape.stride for layer in other.network.layers
    ]
    assert len(traced.network.fixed_padding) == 5
    agree(run(df.merge(df.rewrite(traced, traced.vanilla)), x), run(model, x))
    for space in ("paper", "full"):
        student = df.rewrite(traced, random_plan(traced.network, Random(0), space)).eval()
        agree(run(df.merge(student), x), run(student, x))
