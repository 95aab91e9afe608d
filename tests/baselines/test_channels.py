"""Networks with given widths: which channels stay, and the published sizes of uniform and AMC's MobileNetV2."""

import copy
import sys

import pytest
import torch
from torch import nn

import depthfold as df
from depthfold.baselines import amc_mobilenet_v2, inverted_residuals, narrow, pruning_steps, uniform_width
from depthfold.errors import BackendError, InvalidValue, MissingDependency
from depthfold.latency.profile import count_flops
from depthfold.testing import randomise_statistics
from depthfold.vision import import_timm, import_torchvision
from lacking import needs

pytestmark = needs("torch_pruning")

SMALL = torch.zeros(1, 3, 32, 32)


def mobilenet_v2(width=1.0):
    return import_torchvision().models.mobilenet_v2(weights=None, width_mult=width)


def multiply_adds(model):
    """Return the millions of multiply-adds at 224x224."""
    return count_flops(model, (torch.zeros(1, 3, 224, 224),)) / 2e6


def convolutions(model):
    return [part for part in model.modules() if isinstance(part, nn.Conv2d)]


class Sums(nn.Module):
    """Two convolutions whose outputs are added, a depth-wise one, and a classifier."""

    def __init__(self):
        super().__init__()
        self.stem, self.other = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.norm, self.depthwise = nn.BatchNorm2d(6), nn.Conv2d(6, 6, 3, groups=6)
        self.last, self.head = nn.Conv2d(6, 4, 1), nn.Linear(4, 2)

    def forward(self, x):
        x = self.stem(x)
        x = self.depthwise(torch.relu(self.norm(x + self.other(x))))
        return self.head(self.last(x).mean((2, 3)))


def test_channels_with_the_largest_norms_stay():
    """A model with zeros in place of the other channels computes the same."""
    torch.manual_seed(0)
    model = randomise_statistics(Sums()).eval()
    x = torch.randn(2, 3, 8, 8)
    found = narrow(model, x, {"stem": 4, "last": 3})
    norms = model.stem.weight.abs().sum((1, 2, 3)) + model.other.weight.abs().sum((1, 2, 3))
    gone, gone_last = norms.argsort()[:2], model.last.weight.abs().sum((1, 2, 3)).argsort()[:1]
    zeros = copy.deepcopy(model)
    with torch.no_grad():
        zeros.other.weight[:, gone] = 0
        zeros.last.weight[:, gone] = 0
        zeros.head.weight[:, gone_last] = 0
        torch.testing.assert_close(found(x), zeros(x))
    assert [part.out_channels for part in convolutions(found)] == [4, 4, 4, 3]
    assert [part.out_channels for part in convolutions(model)] == [6, 6, 6, 4]


def test_uniform_width_makes_every_layer_narrower_once():
    found = uniform_width(Sums(), torch.zeros(1, 3, 8, 8), 0.5)
    assert [part.out_channels for part in convolutions(found)] == [3, 3, 3, 2]
    assert found.head.out_features == 2
    assert found(torch.zeros(1, 3, 8, 8)).shape == (1, 2)


@pytest.mark.parametrize(
    ("width", "ratio", "hidden", "total"),
    [
        (1.0, 0.75, [72, 108, 108, 144, 144, 144, *[288] * 4, *[432] * 3, *[720] * 3], 236),
        (1.4, 0.65, [94, 125, 125, 187, 187, 187, *[343] * 4, *[530] * 3, *[874] * 3], 406),
    ],
)
def test_uniform_width_of_the_paper(width, ratio, hidden, total):
    """Only the first layer of each inverted residual block gets narrower, and the depth-wise one with it."""
    model = mobilenet_v2(width)
    network = df.trace(model, SMALL).network
    layers = [network.layers[block.i].where for block in inverted_residuals(network) if len(block) == 3]
    found = uniform_width(model, SMALL, ratio, layers=layers)
    assert [part.out_channels for part in convolutions(found)][3:51:3] == hidden
    assert multiply_adds(found) == pytest.approx(total, abs=0.5)


@pytest.mark.parametrize("make", [mobilenet_v2, lambda: import_timm().create_model("mobilenetv2_100")])
def test_amc_has_the_published_multiply_adds(make):
    found = amc_mobilenet_v2(make(), SMALL)
    assert multiply_adds(found) == pytest.approx(210.6, abs=0.05)
    assert found(SMALL).shape == (1, 1000)


@pytest.mark.parametrize("model", [lambda: mobilenet_v2(1.4), Sums], ids=["width 1.4", "another network"])
def test_amc_is_only_for_mobilenet_v2_of_width_one(model):
    with pytest.raises(
        InvalidValue, match=r"of width 1\.0, whose 52 .* This model has \d+ with \d+, \.\.\., \d+ channels"
    ):
        amc_mobilenet_v2(model(), SMALL)


def test_wrong_arguments_are_refused():
    with pytest.raises(InvalidValue, match=r"no 2-D convolution 'las'\. Did you mean 'last'\?"):
        narrow(Sums(), SMALL, {"las": 1})
    with pytest.raises(InvalidValue, match=r"^'last' has 4 output channels and cannot get 5\.$"):
        narrow(Sums(), SMALL, {"last": 5})
    with pytest.raises(InvalidValue, match=r"above 0 and at most 1, found 1\.5"):
        uniform_width(Sums(), SMALL, 1.5)


class Joined(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.all = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 8, 1), nn.Conv2d(3, 12, 1)
        self.last = nn.Conv2d(12, 5, 1)

    def forward(self, x):
        return self.last(torch.cat([self.one(x), self.two(x)], 1) + self.all(x))


def test_layers_that_cannot_get_narrower_are_refused():
    grouped = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=2), nn.ReLU(), nn.Conv2d(8, 4, 1))
    for name in "01":  # its input and its output
        with pytest.raises(InvalidValue, match=rf"^The channels of '{name}' belong to a convolution with 2 groups"):
            narrow(grouped, SMALL, {name: 4})
    assert narrow(grouped, SMALL, {"0": 8, "1": 8})(SMALL).shape == grouped(SMALL).shape
    with pytest.raises(InvalidValue, match=r"^The channels of 'all' are joined or split"):
        uniform_width(Joined(), SMALL, 0.5)


def test_layers_in_front_of_a_flatten_get_narrower():
    vgg = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(8), nn.Flatten(), nn.Linear(8 * 16, 10))
    found = uniform_width(vgg, SMALL, 0.5)
    assert (found[0].out_channels, found[4].in_features) == (4, 4 * 16)
    kept = vgg[0].weight.detach().abs().sum((1, 2, 3)).argsort(stable=True)[4:].sort().values
    columns = torch.cat([torch.arange(16) + 16 * channel for channel in kept])
    torch.testing.assert_close(found[4].weight, vgg[4].weight[:, columns])


def test_output_keeps_its_shape():
    """Its last convolution is not the last operation, so that nothing says that its channels are the classes."""
    classifier = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 10, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    with pytest.raises(InvalidValue, match=r"changes from \[\(1, 10\)\] to \[\(1, 5\)\]\. Name only"):
        uniform_width(classifier, SMALL, 0.5)
    found = uniform_width(classifier, SMALL, 0.5, layers=["0"])
    assert [part.out_channels for part in convolutions(found)] == [4, 10]


def test_model_that_torch_pruning_cannot_follow_is_explained():
    model = import_torchvision().models.shufflenet_v2_x0_5()
    for attempt in (lambda: uniform_width(model, SMALL, 0.5), lambda: next(pruning_steps(model, SMALL))):
        with pytest.raises(BackendError, match=r"^Torch-Pruning cannot follow the channels of this model: int"):
            attempt()


def test_missing_library_is_explained(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_pruning", None)
    with pytest.raises(
        MissingDependency, match=r"torch_pruning .*\. In a clone of depthfold, run: pip install -e .\.\[baselines\]."
    ):
        narrow(Sums(), SMALL, {"last": 1})
