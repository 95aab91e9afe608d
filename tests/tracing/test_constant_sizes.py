"""Conditions on sizes that are the same for all inputs, such as numbers of channels, are decided while tracing."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import depthfold as df
from nets import Net, codes, conv, folds_exactly, image


class Shuffled(nn.Module):
    """A unit of ShuffleNetV2, whose code computes with the number of channels."""

    def __init__(self):
        super().__init__()
        self.a, self.b = conv(2, 2), conv(2, 2, groups=2)

    def forward(self, x):
        assert x.size(1) == 4
        one, two = torch.split(x, int(x.size(1) / 2), dim=1)
        x = torch.cat([one, self.b(self.a(two)).relu()], dim=1)
        batch, channels, height, width = x.size()
        x = x.view(batch, 2, int(channels // 2), height, width).transpose(1, 2).contiguous()
        return x.view(batch, -1, height, width)


class Widening(nn.Module):
    """A block of a PyramidNet, which pads the channels of its skip if they are fewer."""

    def __init__(self, outs):
        super().__init__()
        self.a, self.b = conv(4, outs), conv(outs, outs)

    def forward(self, x):
        out = self.b(F.relu(self.a(x)))
        missing = out.shape[1] - x.shape[1]
        if missing > 0:
            return F.relu(out + F.pad(x, (0, 0, 0, 0, 0, missing)))
        return F.relu(out + x)


def at_another_size(traced, model):
    x = image(17, batch=3).double()
    merged = df.merge(df.rewrite(traced, traced.vanilla))
    with torch.no_grad():
        torch.testing.assert_close(merged(x), model(x))


def test_channel_shuffle_is_recorded():
    model = nn.Sequential(conv(), nn.ReLU(), Shuffled(), Shuffled(), conv())
    traced = folds_exactly(model, image())
    assert [layer.where for layer in traced.network.layers] == ["0", "2.a", "2.b", "3.a", "3.b", "4"]
    at_another_size(traced, model)


def test_skip_after_a_condition_on_channels_is_found():
    model = nn.Sequential(Widening(4), Widening(4), Widening(6))
    traced = folds_exactly(model, image())
    assert (traced.depth, [(skip.source, skip.target) for skip in traced.network.skips]) == (6, [(0, 2), (2, 4)])
    at_another_size(traced, model)


@pytest.mark.parametrize(
    "varies",
    [
        lambda x: x.permute(0, 2, 3, 1).size(1),
        lambda x: x.shape[0] - 1,
        lambda x: x.shape[1] * x.shape[3],
        lambda x: x.numel(),
        lambda x: x[:, 0].shape[1],
        lambda x: x[..., :12, :12].shape[-1],  # 12 at all larger sizes
    ],
)
def test_condition_on_a_size_that_varies_makes_a_submodule_opaque(varies):
    unit = Net(lambda net, x: net.a(x) if varies(x) % 7 else x, a=conv())
    traced = df.trace(nn.Sequential(conv(), nn.ReLU(), unit, conv()), image(batch=3))
    assert codes(traced)["2"] == "opaque"


def test_second_dimension_of_an_input_need_not_be_channels():
    """The graph of a network whose inputs are NHWC asserts its answer about the height."""

    class Flipped(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = conv()

        def forward(self, x):
            height = x.shape[1]
            x = x.permute(0, 3, 1, 2)
            return self.a(F.pad(x, (0, 1, 0, 1)) if height % 2 else x)

    traced = df.trace(Flipped(), image().permute(0, 2, 3, 1))
    merged = df.merge(df.rewrite(traced, traced.vanilla))
    with pytest.raises(AssertionError, match="size"):
        merged(image(17).permute(0, 2, 3, 1))


def test_condition_in_a_network_for_one_size_makes_a_submodule_opaque():
    unit = Net(lambda net, x: net.a(x.view(2, 4, 12, 13)) if x.view(2, 4, 12, 13).shape[1] == 4 else x, a=conv())
    traced = df.trace(nn.Sequential(conv(), nn.ReLU(), unit, conv()), image())
    assert codes(traced)["2"] == "opaque"
