"""Blocks are timed with the activations of the merged networks."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import depthfold as df
from depthfold.core import Plan, Span
from depthfold.latency.blocks import block_module, block_shapes, timed_with_activation
from depthfold.merging import sketch
from depthfold.rewriting import rewrite


class Mixed(nn.Module):
    """A network with many kinds of activations, Hardswish most often. One layer has none, and one ends a residual."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(11))
        self.acts = nn.ModuleList(
            (
                nn.ReLU(inplace=True), nn.Hardswish(), nn.PReLU(8), nn.PReLU(), nn.Identity(), nn.Hardswish(),
                nn.GELU(), nn.GELU(approximate="tanh"), nn.Hardswish(inplace=True),
            )
        )  # fmt: skip

    def forward(self, x):
        for n, act in enumerate(self.acts):
            x = act(x + self.convs[n](x) if n == 6 else self.convs[n](x))
        return F.silu(self.convs[10](F.relu(self.convs[9](x))))


@pytest.fixture(scope="module")
def mixed():
    return df.trace(Mixed(), torch.randn(1, 8, 6, 6))


def merged_activation(traced, span):
    """Return the activation after the merged convolution of the span, in a network in which only the span is merged."""
    cuts = [l for l in range(1, traced.depth) if not span.i < l < span.j]
    activations = [l for l in cuts if l in traced.network.activations or (l == span.j and len(span) > 1)]
    shallow = sketch(rewrite(traced, Plan(activations=activations, cuts=cuts)))
    position = sum(cut <= span.i for cut in cuts)
    convolutions = [
        node
        for node in shallow.graph.nodes
        if isinstance(dict(shallow.named_modules()).get(str(node.target)), nn.Conv2d)
    ]
    (node,) = convolutions[position].users
    if node.target is operator.add:
        (node,) = node.users
    return signature(shallow, node)


def signature(module, node):
    if node.op == "call_module":
        found = module.get_submodule(node.target)
        if isinstance(found, nn.Conv2d):
            return None
        return type(found), getattr(found, "num_parameters", None), getattr(found, "approximate", None)
    return None if node.op == "output" else same(node.target)


def same(function):
    """Treat F.relu like nn.ReLU: the runtime runs the same code."""
    return (nn.ReLU, None, None) if function is F.relu else function


def block_activation(traced, block):
    module = block_module(traced, block)
    module(*block.inputs())
    last = list(module.graph.nodes)[-2]
    if last.target is operator.add:
        return None
    function = getattr(module.get_submodule(last.target), "target", None)
    return signature(module, last) if function is None else same(function)


def test_every_block_has_the_activation_of_the_merged_network(mixed):
    spans = mixed.spans("full")
    blocks = block_shapes(mixed, spans, 1)
    kinds = set()
    for span in spans:
        wanted = merged_activation(mixed, span)
        assert block_activation(mixed, blocks[span]) == wanted, span
        assert (wanted is not None) == timed_with_activation(mixed.network, span)
        kinds.add(wanted)
    assert len(kinds) == 8  # ReLU, Hardswish, SiLU, two of PReLU and of GELU each, and none


def test_only_blocks_with_the_same_activation_share_an_entry(mixed):
    singles = [Span(l, l + 1) for l in range(mixed.depth)]
    shapes = block_shapes(mixed, singles, 1)
    names = [shapes[span].activation for span in singles]
    assert names == [
        "relu", "hardswish", "prelu", "prelu(num_parameters=1)", None, "hardswish", "gelu",
        "gelu(approximate='tanh')", "hardswish", "relu", "silu",
    ]  # fmt: skip
    for one in singles:
        for other in singles:
            same = names[one.i] == names[other.i] and 6 not in (one.i, other.i)  # layer 7 has an addition
            assert (shapes[one].key == shapes[other].key) == (same or one == other)


@pytest.mark.parametrize(("head", "active"), [((), False), ((nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 4, 1)), True)])
def test_no_block_has_an_activation_where_none_may_be_inserted(head, active):
    """None at a barrier or at the output. With a head that has weights, the last block does not end at the output."""
    convs = [nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)]
    model = nn.Sequential(convs[0], nn.ReLU(), convs[1], nn.AvgPool2d(2), convs[2], nn.ReLU(), convs[3], *head)
    traced = df.trace(model, torch.randn(1, 8, 8, 8), ignore=[str(len(model) - 1)] if head else ())
    assert traced.depth == 4 and traced.network.barriers == (2,) and traced.network.ends_in_output is not active
    blocks = block_shapes(traced, traced.spans())
    assert blocks[Span(0, 2)].activation is None
    assert (blocks[Span(2, 4)].activation is not None) is active
    searched = {flagged.span for flagged in traced.flagged_spans("full") if flagged.b}
    assert {span for span, block in blocks.items() if block.activation is not None} <= searched
