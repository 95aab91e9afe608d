"""Forwards that write to values in place."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import depthfold as df
from nets import Net, agree, codes, conv, folds_exactly, image


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


def added_to_a_map_with_a_view(net, x):
    x = F.relu(net.a(x))
    tokens = x.flatten(2)
    x += net.c(F.relu(net.b(x)))
    return torch.cat([net.d(x).flatten(2), tokens], 1)


def added_to_a_map_with_two_names(name):
    def run(net, x):
        shortcut = x = F.relu(net.a(x))
        x = name(x)
        x += net.c(F.relu(net.b(x)))
        return net.d(x) + shortcut

    return run


def added_to_a_part(net, x):
    x = F.relu(net.a(x))
    one, two = x.chunk(2, 1)
    one += net.part(two)
    return net.d(x)


def scaled_under_another_name(net, x):
    x = F.relu(net.a(x))
    y = x.contiguous()
    z = F.relu(net.b(y))
    y.mul_(0.5)
    return net.c(z) + x


def doubled_before_it_is_added(net, x):
    x = F.relu(net.a(x))
    y = net.b(x)
    y = y + net.drop(y)
    return net.d(F.relu(y + x))


@pytest.mark.parametrize(
    "run",
    [
        added_to_a_map_with_a_view,
        added_to_a_map_with_two_names(lambda x: x.contiguous()),
        added_to_a_map_with_two_names(lambda x: x.to(x.dtype)),
        added_to_a_map_with_two_names(lambda x: x.view(x.shape)),
        added_to_a_part,
        scaled_under_another_name,
        doubled_before_it_is_added,
    ],
)
def test_value_that_is_written_under_one_name_and_read_under_another(run):
    parts = {name: conv() for name in "abcd"}
    folds_exactly(Net(run, **parts, part=conv(2, 2), drop=nn.Dropout()), image())


def test_addition_to_a_value_with_another_name_is_explained():
    model = Net(added_to_a_map_with_a_view, **{name: conv() for name in "abcd"})
    assert "alias" in codes(df.trace(model.eval(), image())).values()


def test_expanded_input_is_verified():
    """A grey image as three equal channels; this memory cannot be written to."""
    folds_exactly(Net(lambda net, x: net.b(net.a(x.expand(-1, 4, -1, -1))), a=conv(), b=conv()), image(channels=1))


def test_inserted_activation_before_a_dropout_in_place_can_be_trained():
    parts = {name: conv() for name in "acd"} | {"after": nn.Dropout2d(inplace=True)}
    model = Net(lambda net, x: net.d(net.after(net.c(F.relu(net.a(x))) + x)), **parts)
    traced = df.trace(model.double().eval(), image().double())
    student = df.rewrite(traced, df.Plan(range(1, traced.depth + 1), range(1, traced.depth))).train()
    student(image().double()).sum().backward()
    assert all(parameter.grad is not None for parameter in student.parameters())


def test_repeated_activation_stays_if_its_value_is_overwritten():
    """After dropping c: relu(relu(x)), where only the second one is scaled."""

    def run(net, x):
        x = F.relu(net.a(x))
        y = F.relu(net.c(x))
        y = y.mul_(torch.sigmoid(net.gate(y.mean((2, 3), keepdim=True))))
        return net.d(y) + x

    model = Net(run, a=conv(), c=conv(), gate=conv(kernel=1), d=conv(kernel=1)).double().eval()
    traced = df.trace(model, image().double())
    vanilla = traced.vanilla
    student = df.rewrite(traced, df.Plan(vanilla.activations, vanilla.cuts, df.core.Drops([2])))
    agree(df.merge(student)(image().double()), student(image().double()))
