"""Forwards that write to values in place."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import depthfold as df
from nets import Net, agree, conv, folds_exactly, image


def relu_as_a_statement(net, x):
    y = net.a(x)
    F.relu_(y)
    return net.b(y)


def module_as_a_statement(net, x):
    y = net.a(x)
    net.act(y)
    return net.b(y)


def addition_as_a_statement(net, x):
    y = net.b(F.relu(net.a(x)))
    y.add_(x)
    return net.c(y)


def clone_before_writing(net, x):
    y = net.a(x)
    kept = y.clone()
    return net.c(net.b(F.relu_(y)) + kept)


def overwritten_skip(net, x):
    y = net.a(x)
    return net.c(net.b(F.relu_(y)) + y)


@pytest.mark.parametrize(
    "run",
    [relu_as_a_statement, module_as_a_statement, addition_as_a_statement, clone_before_writing, overwritten_skip],
    ids=lambda run: run.__name__.replace("_", " "),
)
def test_code_that_writes_in_place_is_merged_exactly(run):
    folds_exactly(Net(run, a=conv(), b=conv(), c=conv(), act=nn.ReLU(inplace=True)), image())


def overwritten_after_the_first_layer(net, x):
    y = net.a(x)
    r = F.relu_(x)
    return torch.cat([net.b(F.relu(y)), r], 1)


def overwritten_before_it_is_added(net, x):
    y = net.a(x)
    r = F.relu_(x)
    return torch.cat([y + x, r], 1)


def added_in_place_and_read_later(net, x):
    y = net.a(x)
    w = net.b(F.relu(y))
    z = torch.cat([w, y], 1)
    w += x
    return torch.cat([z, w], 1)


@pytest.mark.parametrize(
    "run", [overwritten_after_the_first_layer, overwritten_before_it_is_added, added_in_place_and_read_later]
)
def test_overwritten_values_are_merged_exactly(run):
    model = Net(run, a=conv(), b=conv()).double().eval()
    traced = df.trace(model, image().double())
    for plan in (traced.vanilla, df.Plan((), traced.network.barriers)):
        student = df.rewrite(traced, plan)
        agree(df.merge(student)(image().double()), student(image().double()))
    agree(df.rewrite(traced, traced.vanilla)(image().double()), model(image().double()))
