"""Small models, and their merged networks."""

from random import Random

import torch
from torch import nn

import depthfold as df
from depthfold.testing import random_plan, randomise_statistics
from nets import Net, conv, image


def classifier(seed=0, activation=nn.ReLU, classes=4, width=6):
    """Return three convolutions, a residual around the last two, and a head that is not merged."""
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


def merged(model, inputs=None, plan=None, seed=1, **options):
    """Return the merged network of a model, by default with a random plan."""
    traced = df.trace(model, picture() if inputs is None else inputs, **options)
    return df.merge(df.rewrite(traced, plan or random_plan(traced.network, Random(seed), "full")))


class Around(nn.Module):
    """A backbone inside a model whose forward torch.fx cannot trace."""

    def __init__(self, seed=0):
        super().__init__()
        self.backbone, self.head = classifier(seed), nn.Linear(4, 2)
        nn.init.normal_(self.head.weight, generator=torch.Generator().manual_seed(seed))
        self.register_buffer("offset", torch.full((2,), 0.5 + seed), persistent=False)

    def forward(self, image):
        scale = 2.0 if float(image.sum()) > 0 else 1.0
        return {"scores": self.head(self.backbone(image * scale)) + self.offset, "scale": torch.tensor(scale)}


def small():
    """Return a stem and a pool, followed by a residual with a projection, dropout and a depth-wise layer."""
    return nn.Sequential(
        nn.Sequential(conv(4, 6, stride=2, bias=False), nn.BatchNorm2d(6, eps=0.1), nn.ReLU()),
        nn.MaxPool2d(3, 1, 1),
        Residual(6, 8, stride=1),
        nn.Dropout(0.2),
        conv(8, 8, groups=8),
        nn.BatchNorm2d(8, eps=0.01),
        nn.ReLU6(),
        conv(8, 4, kernel=1),
    )


class Residual(nn.Module):
    def __init__(self, ins, outs, stride):
        super().__init__()
        self.a, self.n1 = conv(ins, outs, stride=stride, bias=False), nn.BatchNorm2d(outs)
        self.b, self.n2 = conv(outs, outs, bias=False), nn.BatchNorm2d(outs)
        self.down = nn.Sequential(nn.Conv2d(ins, outs, 1, stride=stride, bias=False), nn.BatchNorm2d(outs, eps=0.3))
        self.act = nn.ReLU6()

    def forward(self, x):
        return self.act(self.n2(self.b(self.act(self.n1(self.a(x))))) + self.down(x))


def folded(model=None, x=None, plan=None, dtype=torch.float64):
    """Return the student and the shallow network, and an input."""
    model = randomise_statistics(small() if model is None else model).to(dtype).eval()
    x = (image() if x is None else x).to(dtype)
    traced = df.trace(model, x)
    student = df.rewrite(traced, plan or df.Plan((), ()))
    return student, df.merge(student), x
