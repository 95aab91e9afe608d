"""A trace that was pickled, as for the worker processes of an executor, is the same trace."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import depthfold as df
from depthfold.jobs import Job, Processes
from depthfold.testing import randomise_statistics
from depthfold.vision import import_torchvision
from nets import Net, agree, conv, image, only


def survives_pickling(model, x):
    """Assert that the nodes of a trace keep their names, and that plans give the same outputs before and after."""
    traced = df.trace(randomise_statistics(model).double().eval(), x.double())
    sent = pickle.loads(pickle.dumps(traced))
    assert names(sent) == names(traced) and sent.surroundings_digest == traced.surroundings_digest
    span = min((span for span in traced.spans("full") if len(span) > 1), key=len)
    for plan in (traced.vanilla, only(traced, span.i, span.j)):
        for made in (df.rewrite, lambda trace, plan: df.merge(df.rewrite(trace, plan))):
            found, wanted = made(sent, plan), made(traced, plan)
            with torch.no_grad():
                agree(found(x.double()), wanted(x.double()), tolerance=0)
    return traced


def names(traced):
    return [(node.op, node.name) for node in traced.graph.graph.nodes]


def added(net, x):
    y = net.b(F.relu(net.a(x)))
    y += x
    return net.c(F.relu(y))


def added_twice(net, x):
    y = net.b(F.relu(net.a(x)))
    y += x
    z = net.c(F.relu(y))
    z += y
    z = z + x
    return net.d(F.relu(z))


def added_both_ways(net, x):
    y = x + net.b(F.relu(net.a(x)))
    z = net.c(F.relu(y))
    z += y
    return net.d(F.relu(z).add_(x))


def gated(net, x):
    y = net.b(F.relu(net.a(x)))
    y *= torch.sigmoid(net.c(y.mean((2, 3), keepdim=True)))
    y += x
    return net.d(F.relu(y))


def scaled(net, x):
    y = net.b(F.relu(net.a(x)))
    y *= 0.5
    y -= x
    y /= 2
    return net.c(F.relu(y))


def computed_and_shifted(net, x):
    y = net.a(x)
    y = net.b(y * torch.sigmoid(y))
    y -= net.c(x)
    y **= 2
    y %= 3
    return net.d(y)


@pytest.mark.parametrize("run", [added, added_twice, added_both_ways, gated, scaled, computed_and_shifted])
def test_trace_of_a_network_that_writes_in_place_is_the_same_after_pickling(run):
    survives_pickling(Net(run, **{name: conv() for name in "abcd"}), image())


class Added(nn.Module):
    """A network with y += x whose class can be imported by a worker process."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = conv(), conv(), conv()

    def forward(self, x):
        return added(self, x)


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small"])
def test_networks_of_torchvision_are_the_same_after_pickling(name):
    torch.manual_seed(0)
    traced = survives_pickling(import_torchvision().models.get_model(name, num_classes=4), image(channels=3, size=32))
    assert traced.network.skips


def test_worker_process_rewrites_a_network_that_adds_in_place():
    traced = df.trace(Added().eval(), image())

    def setup():
        return lambda plan: df.merge(df.rewrite(traced, plan))(image()).detach().numpy()

    (outcome,) = Processes(workers=1).run(setup, [Job(key="vanilla", payload=traced.vanilla)])
    assert outcome.failure is None
    agree(torch.from_numpy(outcome.result), df.merge(df.rewrite(traced, traced.vanilla))(image()).detach(), 1e-5)
