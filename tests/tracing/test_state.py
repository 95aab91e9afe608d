"""State that a forward keeps from one call to the next: its module is called as it is, or tracing refuses."""

import pytest
import torch
from test_fooled import Inner, computes_the_same, inside
from torch import nn

import depthfold as df
from depthfold.errors import TraceError
from nets import agree, conv, image


def counts(net, x):
    net.calls += 1
    return net.c(x) * net.calls


def counts_up_to_ten(net, x):
    net.calls += 1
    return net.c(x) if net.calls < 10 else net.c(x) * 2


def changes_a_buffer(net, x):
    net.mean = 0.9 * net.mean + 0.1 * x.mean()
    return net.c(x - net.mean)


def changes_a_buffer_in_place(net, x):
    net.mean += 1
    return net.c(x) - net.mean


def reads_what_it_kept(net, x):
    before, net.last = net.last, x
    return net.c(x if before is None else x + before)


def appends(net, x):
    net.calls.append(len(net.calls))
    return net.c(x) * len(net.calls)


class Buffered(Inner):
    def __init__(self, run):
        super().__init__(run)
        self.register_buffer("mean", torch.zeros(()))


STATEFUL = {
    "counter": lambda: Inner(counts, calls=0),
    "counter that matters later": lambda: Inner(counts_up_to_ten, calls=0),
    "buffer": lambda: Buffered(changes_a_buffer),
    "buffer in place": lambda: Buffered(changes_a_buffer_in_place),
    "kept value": lambda: Inner(reads_what_it_kept, last=None),
    "list": lambda: Inner(appends, calls=[]),
}


@pytest.mark.parametrize("kind", STATEFUL)
def test_state_that_a_forward_changes_makes_its_module_opaque(kind):
    traced = computes_the_same(nn.Sequential(conv(), nn.ReLU(), STATEFUL[kind](), nn.ReLU(), conv()), calls=12)
    assert traced.depth == 2
    (found,) = [each for each in traced.network.refusals if each.position == 1]
    assert found.where == "2"
    assert found.code == ("misrecorded" if kind == "kept value" else "state")


@pytest.mark.parametrize("kind", ["counter", "counter that matters later", "buffer in place", "list"])
def test_state_of_the_whole_forward_is_refused_by_its_name(kind):
    name = {"buffer in place": "mean"}.get(kind, "calls")
    with pytest.raises(TraceError, match=f"changes {name}, and the next call may read it"):
        df.trace(STATEFUL[kind](), image())


def test_a_value_that_is_only_kept_does_not_matter():
    def keeps(net, x):
        net.last = net.c(x)
        return net.last

    traced = computes_the_same(inside(keeps))
    assert traced.depth == 3


def test_a_cache_that_is_filled_once_does_not_matter():
    def caches(net, x):
        if net.scale is None:
            net.scale = 3
        return net.c(x) + net.scale

    assert computes_the_same(inside(caches, scale=None)).depth == 3


def test_the_model_and_the_snapshot_keep_their_state():
    model = nn.Sequential(conv(), Inner(counts, calls=0), conv()).double().eval()
    traced = df.trace(model, image().double())
    assert model[1].calls == 0
    merged = df.merge(df.rewrite(traced, traced.vanilla))
    agree(merged(image().double()), model(image().double()))


def test_random_numbers_drawn_while_recording_are_not_constants():
    def noisy(net, x):
        return net.c(x) + torch.randn(4, 1, 1).double()

    model = nn.Sequential(conv(), nn.ReLU(), Inner(noisy), conv()).double().eval()
    traced = df.trace(model, image().double())
    assert {each.where for each in traced.network.refusals if each.position == 1} == {"2"}
    merged = df.merge(df.rewrite(traced, traced.vanilla))
    torch.manual_seed(3)
    found = merged(image().double())
    torch.manual_seed(3)
    agree(found, model(image().double()))


def test_a_part_that_keeps_a_value_for_the_rest_of_the_model():
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = conv(), conv()

        def forward(self, x):
            self.last = self.a(x)
            return self.b(torch.relu(self.last))

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Part()

        def forward(self, x):
            return self.part(x) + self.part.last

    with pytest.raises(TraceError, match=r"last.*at="):
        df.trace(Whole(), image(), at="part")
