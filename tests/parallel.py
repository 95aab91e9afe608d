"""What the tests of parallel branches share: blocks between other layers, and the comparison that they must stand."""

import torch
from torch import nn

import depthfold as df
from nets import conv, folds_exactly, image


def conv_bn(ins=4, outs=4, kernel=3, **given):
    return nn.Sequential(conv(ins, outs, kernel, **dict(bias=False) | given), nn.BatchNorm2d(outs, eps=0.1))


def convolutions(module):
    return sum(isinstance(part, nn.Conv2d) for part in module.modules())


def merged(traced, plan=None):
    return df.merge(df.rewrite(traced, plan or traced.vanilla))


class Between(nn.Module):
    """A block with a convolution before it and two after it, so that segments can hold it at every place."""

    def __init__(self, block, outs=4):
        super().__init__()
        self.before, self.block, self.act = conv(4, 4), block, nn.ReLU()
        self.after, self.last = conv(outs, 4), conv(4, 3, kernel=1)

    def forward(self, x):
        return self.last(torch.relu(self.after(self.act(self.block(torch.relu(self.before(x)))))))


def is_one_layer(block, outs=4, terms=None):
    """The block is one layer of the network; it merges exactly inside segments of every length."""
    model = Between(block, outs)
    traced = folds_exactly(model, image(13), plans=8)
    assert (traced.depth, traced.network.barriers) == (4, ())
    assert {(skip.source, skip.target) for skip in traced.network.skips} <= {(1, 2)}
    if terms is not None:
        assert len(traced.network.skips) == terms - 1
    assert convolutions(merged(traced)) == 4
    return traced
