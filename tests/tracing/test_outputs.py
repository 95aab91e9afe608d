"""If the value after the last layer is an output of the network, no plan puts an activation there."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision import models

import depthfold as df
from depthfold.core import Network
from nets import Net, conv, image
from tables import plausible_tables


def body():
    return nn.Sequential(conv(), nn.ReLU(), conv(), nn.ReLU(), conv())


class Functional(nn.Module):
    """A transposed convolution with a weight of this module, used directly or computed from."""

    def __init__(self, computed):
        super().__init__()
        self.body, self.computed = body(), computed
        self.weight = nn.Parameter(torch.randn(4, 3, 1, 1))

    def forward(self, x):
        weight = F.normalize(self.weight) * 2 if self.computed else self.weight
        return F.conv_transpose2d(F.max_pool2d(self.body(x), 2), weight)


def at_the_end(traced):
    return {(flagged.i, flagged.a, flagged.b) for flagged in traced.flagged_spans() if flagged.j == traced.depth}


def test_no_plan_puts_an_activation_on_an_output():
    model = nn.Sequential(conv(3, 8), nn.ReLU(), conv(8, 8), nn.ReLU(), conv(8, 3))
    traced = df.trace(model, image(channels=3))
    assert traced.network.ends_in_output
    assert at_the_end(traced) == {(0, True, False), (1, True, False), (2, True, False)}
    for space in ("paper", "full"):
        tables = plausible_tables(traced.spans(space), traced.flagged_spans(space), 0)
        frontier = df.solve(*tables, network=traced.network)
        assert all(3 not in traced.network.final_activations(solved.plan) for solved in frontier)
    student = df.rewrite(traced, next(iter(frontier)))
    assert student(image(channels=3)).min() < 0


@pytest.mark.parametrize(
    ("after", "is_output"),
    [
        (nn.Identity(), True),
        (nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Softmax(1)), True),
        (nn.Upsample(scale_factor=2), True),
        (nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)), False),
        (nn.Sequential(nn.MaxPool2d(2), nn.ConvTranspose2d(4, 2, 2)), False),
    ],
)
def test_weights_after_the_last_layer_decide(after, is_output):
    assert df.trace(nn.Sequential(body(), after), image()).network.ends_in_output == is_output


@pytest.mark.parametrize("computed", [False, True])
def test_functional_weights_count(computed):
    assert not df.trace(Functional(computed), image()).network.ends_in_output


def test_weights_beside_the_last_layer_do_not_count():
    net = Net(lambda net, x: (net.body(x), net.head(x.mean((2, 3)))), body=body(), head=nn.Linear(4, 2))
    assert df.trace(net, image()).network.ends_in_output
    # Neither do weights before it whose output is read again after it.
    shared = Net(
        lambda net, x: F.max_pool2d(net.body(net.up(x)), 2) + net.up(x).mean(), body=body(), up=nn.Linear(13, 13)
    )
    assert df.trace(shared, image()).network.ends_in_output


def test_ignored_layer_after_the_last_one_counts():
    model = nn.Sequential(body(), nn.ReLU(), conv())
    assert df.trace(model, image()).network.ends_in_output
    assert not df.trace(model, image(), ignore=["2"]).network.ends_in_output


def test_a_segmentation_network_has_an_output_at_its_end():
    traced = df.trace(models.segmentation.fcn_resnet50(weights=None, weights_backbone=None).eval(), image(64, 3, 1))
    assert traced.network.layers[-1].where == "classifier.4"
    assert traced.network.ends_in_output
    assert not any(b for _, _, b in at_the_end(traced))


def test_mobilenet_v2_does_not_end_in_an_output():
    traced = df.trace(models.mobilenet_v2(), image(64, 3, 1), ignore=["features.0.*", "features.18.*"])
    assert not traced.network.ends_in_output
    assert len(traced.flagged_spans()) == 315


class Whole(nn.Module):
    """A body after a stem, followed by the given operations."""

    def __init__(self, after, **parts):
        super().__init__()
        self.after, self.stem, self.body = after, conv(), body()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.after(self, self.body(self.stem(x)))


@pytest.mark.parametrize(
    ("whole", "is_output"),
    [
        (Whole(lambda whole, x: x), True),
        (Whole(lambda whole, x: F.softmax(x.mean((2, 3)), 1)), True),
        (Whole(lambda whole, x: x, unused=conv()), True),
        (Whole(lambda whole, x: whole.head(x), head=conv()), False),
        (Whole(lambda whole, x: whole.head(F.layer_norm(x, x.shape[1:])), head=conv()), False),
        (Whole(lambda whole, x: (x, whole.beside(torch.ones(1, 4, 3, 3))), beside=conv()), True),
        (Whole(lambda whole, x: x.reshape(-1, 7)), False),  # fails, so the result is unknown
        (Whole(lambda whole, x: F.conv2d(x, whole.weight), weight=nn.Parameter(torch.randn(2, 4, 1, 1))), False),
    ],
)
def test_weights_after_the_submodule_at_decide(whole, is_output):
    assert df.trace(whole, image(), at="body").network.ends_in_output == is_output


def test_fingerprint_does_not_depend_on_ends_in_output():
    traced = df.trace(body(), image())
    data = traced.network.to_json()
    assert data.pop("ends_in_output") is True
    old = Network.from_json(data)
    assert not old.ends_in_output
    assert old.fingerprint == traced.network.fingerprint
    assert Network.from_json(traced.network.to_json()) == traced.network


def test_manual_plan_may_put_an_activation_on_an_output():
    traced = df.trace(body().double(), image().double())
    student = df.rewrite(traced, df.Plan({3}, ()))
    assert student(image().double()).min() >= 0
    assert df.verify(student, df.merge(student))
