"""For the tests of seeded faults: a registry, small networks with plans, and a comparison with tests/reference.py."""

from functools import wraps

import torch

import depthfold as df
from depthfold.core import Drops, Span
from depthfold.testing import Block, Conv, NetworkSpec, Pool, SmallCNN, randomise_statistics
from nets import agree
from reference import evaluate


class Faults(dict):
    """Functions by name that break the code with a monkeypatch. Used as a decorator, it adds one."""

    def __call__(self, function):
        self[function.__name__.replace("_", " ")] = function
        return function


class NetworkFaults(Faults):
    """Faults with the name of the network in which they must show. A fault returns this name."""

    def __call__(self, network):
        def add(function):
            @wraps(function)
            def inject(patch):
                function(patch)
                return network

            return Faults.__call__(self, inject)

        return add


def replace_with(patch, owner, name, make):
    """Replace owner.name with make(original)."""
    patch.setattr(owner, name, make(getattr(owner, name)))


def conv(out=4, kernel=(3, 3), stride=1, pad=None, dilation=1, **given):
    """Return a convolution that keeps the size unless `pad` is given."""
    if pad is None:
        pad = tuple(((k - 1) * dilation // 2,) * 2 for k in kernel)
    return Conv(out=out, kernel=kernel, stride=(stride,) * 2, padding=pad, dilation=(dilation,) * 2, **given)


def network(*parts, channels=4):
    return NetworkSpec(channels=channels, size=(11, 10), parts=parts)


def sequence(*items):
    return Block(items=items)


NETWORKS = {
    "strides": (
        network(
            sequence(conv(stride=2, eps=0.1), conv(6, (3, 2), pad=((1, 1), (0, 2))), conv(4, (1, 1)), conv(4, stride=2))
        ),
        [((), ()), ((2,), (2,)), ((1, 4), (1,))],
    ),
    "residual": (
        network(
            sequence(conv(eps=0.5)),
            Block(items=(conv(), conv(activation=None, kernel=(3, 1))), skip="identity"),
            sequence(conv(bias=False)),
        ),
        [((), ()), ((1, 3), (1, 3)), ((1, 3), (1, 2, 3)), ((3,), (3,))],
    ),
    "projection": (
        network(
            sequence(conv()),
            Block(
                items=(conv(6, stride=2), conv(6, activation=None)),
                skip="projection",
                stride=(2, 2),
                activation="method",
            ),
            sequence(conv(eps=None)),
        ),
        [((), ()), ((1,), (1,)), ((1, 2, 3), (1, 2, 3))],
    ),
    "branches": (
        network(
            sequence(
                conv(beside=("point", "norm", "pool"), nested=True),
                conv(beside=("identity", "pool and point"), nested=True),
                conv(6, stride=2, beside=("twin", "point", "pool and point")),
                conv(groups=2),
            ),
        ),
        [((), ()), ((1, 2, 3), (1, 2, 3)), ((2,), (2,)), ((1,), (1,)), ((3,), (3,))],
    ),
    "groups": (
        network(
            sequence(
                conv(12, groups=2),
                conv(12, groups=4),
                conv(6, (1, 1), groups=6),
                conv(12, groups=3),
                conv(12, groups=12),
                conv(4, groups=4, kernel=(1, 1)),
            ),
            channels=8,
        ),
        [((), ()), ((2,), (2,)), ((1, 3, 5), (1, 3, 5)), ((4,), (4,))],
    ),
    "dilations": (
        network(
            sequence(
                conv(dilation=2), conv(kernel=(2, 3), dilation=2), conv(kernel=(3, 3)), conv(kernel=(3, 1), dilation=3)
            ),
        ),
        [((), ()), ((2,), (2,)), ((), (1,))],
    ),
    "same": (
        network(
            sequence(
                conv(kernel=(2, 4), pad=((0, 1), (1, 2)), same=True),
                conv(),
                conv(kernel=(4, 2), pad=((1, 2), (0, 1)), same=True),
            ),
            Pool(),
            sequence(conv(kernel=(2, 2), pad=((0, 1), (0, 1)), same=True), conv()),
        ),
        [((), ()), ((1, 2, 3), (1, 2, 3, 4))],
    ),
}

# The plans also drop layers and branches.
DROPPING = {
    "residuals": (
        network(
            sequence(conv(eps=0.5), conv(kernel=(3, 2), pad=((1, 1), (0, 1)))),
            Block(
                items=(Block(items=(conv(), conv(activation=None)), skip="identity"), conv(activation=None)),
                skip="identity",
                activation="function",
            ),
            sequence(conv(kernel=(5, 3))),
        ),
        [
            ((1, 2, 5), (1, 2, 5), Drops([2])),
            ((1,), (1,), Drops([2, 4])),
            ((1, 2), (1, 2, 4, 5), Drops([5])),
            ((1,), (1,), Drops([3, 4])),
            ((), (), Drops([3, 4, 5])),
            ((), (), Drops([5], [Span(2, 4)])),
            ((2, 5), (2, 5), Drops((), [Span(2, 5)])),
            ((2,), (2,), Drops((), [Span(2, 4)])),
            ((2,), (2,), Drops([3], [Span(2, 4), Span(2, 5)])),
        ],
    ),
    "projection": (
        network(
            sequence(conv()),
            Block(items=(conv(), conv(activation=None)), skip="projection", stride=(1, 1)),
            sequence(conv(kernel=(3, 5)), conv()),
        ),
        [((1,), (1,), Drops([2, 3])), ((), (), Drops([1, 2, 3])), ((1, 3), (1, 3), Drops([2]))],
    ),
}


def check(networks=NETWORKS, only=None):
    """Compare the rewritten and merged networks, or only the one of this name, with the reference."""
    for seed, (name, (spec, plans)) in enumerate(networks.items()):
        if only not in (None, name):
            continue
        torch.manual_seed(seed)
        model = randomise_statistics(SmallCNN(spec), seed).double().eval()
        x = torch.randn(2, spec.channels, *spec.size, dtype=torch.float64)
        traced = df.trace(model, x)
        with torch.no_grad():
            for given in plans:
                plan = df.Plan(*given)
                student = df.rewrite(traced, plan)
                shallow = df.merge(student)
                for inputs in (x, torch.randn(1, spec.channels, 13, 14, dtype=torch.float64)):
                    wanted = evaluate(model, inputs, plan)
                    agree(student(inputs), wanted)
                    agree(shallow(inputs), wanted)
