"""Small models to be saved and exported, and the merged networks that are made of them."""

from random import Random

import torch
from torch import nn

import depthfold as df
from depthfold.testing import random_plan, randomise_statistics
from nets import Net, conv


def classifier(seed=0, activation=nn.ReLU, classes=4, width=6):
    """Three convolutions, a residual around the last two, and a head that is not merged."""
    torch.manual_seed(seed)

    def run(net, x):
        x = net.act1(net.norm1(net.conv1(x)))
        x = net.act3(x + net.norm3(net.conv3(net.act2(net.norm2(net.conv2(x))))))
        return net.head(net.last(x.mean((2, 3))))

    return randomise_statistics(
        Net(
            run,
            conv1=conv(3, width),
            norm1=nn.BatchNorm2d(width),
            act1=nn.ReLU(),
            conv2=conv(width, width, bias=False),
            norm2=nn.BatchNorm2d(width),
            act2=nn.ReLU(),
            conv3=conv(width, width),
            norm3=nn.BatchNorm2d(width),
            act3=nn.ReLU(),
            last=activation(),
            head=nn.Linear(width, classes),
        ),
        seed,
    ).eval()


def picture(batch=2, seed=5):
    return torch.randn(batch, 3, 9, 8, generator=torch.Generator().manual_seed(seed))


def merged(model, inputs=None, plan=None, seed=1, **asked):
    """The merged network of a model: by a plan, or by one drawn at random."""
    traced = df.trace(model, picture() if inputs is None else inputs, **asked)
    return df.merge(df.rewrite(traced, plan or random_plan(traced.network, Random(seed), "full")))


class Around(nn.Module):
    """A model whose own forward torch.fx cannot trace, around a backbone."""

    def __init__(self, seed=0):
        super().__init__()
        self.backbone, self.head = classifier(seed), nn.Linear(4, 2)
        nn.init.normal_(self.head.weight, generator=torch.Generator().manual_seed(seed))
        self.register_buffer("offset", torch.full((2,), 0.5 + seed), persistent=False)

    def forward(self, image):
        scale = 2.0 if float(image.sum()) > 0 else 1.0
        return {"scores": self.head(self.backbone(image * scale)) + self.offset, "scale": torch.tensor(scale)}
