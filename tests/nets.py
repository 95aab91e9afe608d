"""Small networks for tests, and the comparison that all of them must stand."""

from random import Random

import torch
from torch import nn

import depthfold as df
from depthfold.testing import random_plan, randomise_statistics


class Net(nn.Module):
    """A network in one line: `Net(lambda net, x: net.b(net.a(x)), a=conv(4, 4), b=conv(4, 4))`."""

    def __init__(self, run, **parts):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.run(self, x)


def conv(ins=4, outs=4, kernel=3, **given):
    """A convolution that keeps the size unless told otherwise."""
    return nn.Conv2d(ins, outs, kernel, **dict(padding=kernel // 2) | given)


def image(size=12, channels=4, batch=2, seed=0):
    return torch.randn(batch, channels, size, size + 1, generator=torch.Generator().manual_seed(seed))


def codes(traced):
    """What was refused, by place."""
    found = {}
    for refusal in traced.network.refusals:
        found.setdefault(refusal.where, refusal.code)
    return found


def refusal(traced, where):
    return next(each for each in traced.network.refusals if each.where == where)


def pairs(spans):
    return [(span.i, span.j) for span in spans]


def only(traced, i, j):
    """The plan that merges one span and leaves everything else as it is."""
    cuts = [p for p in range(1, traced.depth) if not i < p < j]
    return df.Plan({p for p in traced.network.activations if p in cuts}, cuts)


def agree(found, wanted, tolerance=1e-10):
    """Equal up to a share of the largest value."""
    assert found.shape == wanted.shape
    assert torch.isfinite(found).all()
    assert (found - wanted).abs().max() <= tolerance * wanted.abs().max()


def folds_exactly(model, x, plans=3, **given):
    """Trace in float64; the network as it was computes what the model computes, and every plan merges exactly."""
    model, x = randomise_statistics(model).double().eval(), x.double()
    traced = df.trace(model, x.clone(), **given)
    with torch.no_grad():
        agree(df.rewrite(traced, traced.vanilla)(x.clone()), model(x.clone()))
        agree(df.merge(df.rewrite(traced, traced.vanilla))(x.clone()), model(x.clone()))
        everything = df.Plan((), ())
        for plan in (everything, *(random_plan(traced.network, Random(seed)) for seed in range(plans))):
            student = df.rewrite(traced, plan)
            agree(df.merge(student)(x.clone()), student(x.clone()))
    return traced


class Opaque(nn.Module):
    """Its forward cannot be traced, so what it calls is not seen."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) if x.sum() > 0 else self.inner(-x)
