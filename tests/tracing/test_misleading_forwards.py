"""Forwards that mislead a tracer: they are merged exactly, or tracing refuses them with a reason."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import depthfold as df
from depthfold.errors import TraceError
from nets import Net, agree, conv, image


def two(run):
    """A network with two convolutions, a and b, and this forward."""
    return Net(run, a=conv(), b=conv())


class Inner(nn.Module):
    """A submodule with a convolution and the given forward."""

    def __init__(self, run, **state):
        super().__init__()
        self.c, self.run = conv(), run
        for name, value in state.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.run(self, x)


def inside(run, **state):
    """A network with an Inner submodule in the middle."""
    return nn.Sequential(conv(), nn.ReLU(), Inner(run, **state), nn.ReLU(), conv())


# Values with two names, written in place.


def alias_then_iadd(net, x):
    x = net.a(x)
    identity = x
    x += torch.tanh(x)
    return net.b(torch.relu(x)) + identity


def alias_then_imul(net, x):
    x = net.a(x)
    other = x
    x *= 2
    return net.b(x) + other


def alias_then_isub_of_itself(net, x):
    y = x = net.a(x)
    y -= y.mean()
    return net.b(x)


def alias_then_method(net, x):
    x = net.a(x)
    kept = x
    x.add_(1).mul_(0.5)
    return net.b(F.relu(kept)) + x


def relu_in_place_then_the_name_before(net, x):
    y = net.a(x)
    z = F.relu(y, inplace=True)
    return net.b(z) + y


def relu_statement(net, x):
    y = net.a(x)
    y.relu_()
    return net.b(y)


def residual_written_before_it_is_added(net, x):
    y = net.a(x)
    out = net.b(F.relu(y))
    y.mul_(3)
    return out + y


def clone_protects(net, x):
    y = net.a(x)
    kept = y.clone()
    y += 1
    return net.b(y) + kept


def detach_does_not_protect(net, x):
    y = net.a(x)
    kept = y.detach()
    y += 1
    return net.b(y) + kept


def input_written(net, x):
    x += 1
    return net.b(F.relu(net.a(x))) + x


def out_argument(net, x):
    y = net.a(x)
    kept = y
    torch.mul(y, 2, out=y)
    return net.b(y) + kept


def out_into_another(net, x):
    y = net.a(x)
    buffer = torch.zeros_like(y)
    torch.add(y, x, out=buffer)
    return net.b(F.relu(buffer)) + buffer


# Writes to parts of values.


def slice_written(net, x):
    y = net.a(x)
    y[:, :2].add_(1)
    return net.b(F.relu(y))


def slice_iadd(net, x):
    y = net.a(x)
    y[:, :2] += 1
    return net.b(y)


def item_assigned(net, x):
    y = net.a(x)
    y[:, 0] = 0
    return net.b(y)


def chunk_written(net, x):
    y = net.a(x)
    first, _ = y.chunk(2, 1)
    first += 1
    return net.b(F.relu(y))


def view_written(net, x):
    y = net.a(x)
    flat = y.view(y.size(0), -1)
    flat.mul_(0.5)
    return net.b(y)


def transposed_written(net, x):
    y = net.a(x)
    y.transpose(2, 3).add_(torch.ones(1))
    return net.b(y) + y


def residual_whose_part_is_written(net, x):
    y = net.a(x)
    part = y[:, 1:]
    out = net.b(F.relu(y))
    part += 1
    return out + y


def padded_then_written(net, x):
    y = net.a(x)
    z = F.pad(y, (0, 0, 0, 0))
    z += 1
    return net.b(z) + y


# Type checks.


def is_instance(net, x):
    return net.b(net.a(x)) if isinstance(x, torch.Tensor) else net.a(net.b(x)) * 2


def is_tensor(net, x):
    return net.b(F.relu(net.a(x)) if torch.is_tensor(x) else x)


def is_instance_for_torchscript(net, x):
    return net.b(F.relu(net.a(x)) if torch.jit.isinstance(x, torch.Tensor) else x)


def other_than_a_list_for_torchscript(net, x):
    return net.b(F.relu(net.a(x)) if not torch.jit.isinstance(x, list[torch.Tensor]) else x[0])


def as_tensor(net, x):
    scale = torch.as_tensor(data=[2.0], dtype=x.dtype)
    halved = torch.as_tensor(x, dtype=torch.int32) // 2
    return torch.as_tensor(net.b(F.relu(net.a(x * scale)))) + halved


def is_of_type(net, x):
    return net.b(net.a(x)) if type(x) is torch.Tensor else net.b(x)


def list_or_tensor(net, x):
    maps = [x] if isinstance(x, torch.Tensor) else x
    return net.b(torch.cat([net.a(each) for each in maps], 1))


def number_of_dimensions(net, x):
    return net.b(net.a(x)) if x.dim() == 4 and x.ndim == 4 else net.a(x)


def weight_is_a_parameter(net, x):
    return net.b(net.a(x)) if isinstance(net.a.weight, nn.Parameter) else net.b(x)


def has_attribute(net, x):
    return net.b(net.a(x)) if not hasattr(x, "tensors") else net.b(x)


# Caught errors.


def try_iteration(net, x):
    try:
        parts = list(x)
    except Exception:  # noqa: BLE001
        return net.b(x)
    return net.b(net.a(torch.stack(parts)))


def try_float(net, x):
    try:
        scale = float(x.abs().max() > 0)
    except Exception:  # noqa: BLE001
        scale = 0.0
    return net.b(net.a(x)) * scale


# Containers.


def dictionary(net, x):
    found = {"a": net.a(x)}
    found["b"] = net.b(F.relu(found["a"]))
    found["a"] += found["b"]
    return found["a"] * found["b"]


def list_of_aliases(net, x):
    y = net.a(x)
    maps = [y, y]
    maps[0] += 1
    return net.b(maps[1])


def sum_of_a_list(net, x):
    return net.b(sum([net.a(x), x]))


WHOLE = [
    alias_then_iadd, alias_then_imul, alias_then_isub_of_itself, alias_then_method, relu_in_place_then_the_name_before,
    relu_statement, residual_written_before_it_is_added, clone_protects, detach_does_not_protect, input_written,
    out_argument, out_into_another, slice_written, slice_iadd, item_assigned, chunk_written, view_written,
    transposed_written, residual_whose_part_is_written, padded_then_written, is_instance, is_tensor, list_or_tensor,
    is_instance_for_torchscript, other_than_a_list_for_torchscript, as_tensor,
    number_of_dimensions, weight_is_a_parameter, dictionary, list_of_aliases, sum_of_a_list,
]  # fmt: skip


def merges_exactly(model, calls=3):
    """Compare the model with the merged vanilla plan over several calls. Then merge everything that can be merged."""
    model = model.double().eval()
    traced = df.trace(model, image().double())
    student = df.rewrite(traced, df.Plan((), traced.network.barriers))
    for one, two in (
        (df.merge(df.rewrite(traced, traced.vanilla)), copy.deepcopy(model)),
        (df.merge(student), student),
    ):
        for seed in range(calls):
            x = image(seed=seed).double()
            with torch.no_grad():
                agree(one(x.clone()), two.eval()(x.clone()))
    return traced


@pytest.mark.parametrize("run", WHOLE)
def test_forward_is_recorded_correctly(run):
    traced = merges_exactly(two(run))
    assert traced.depth == 2
    assert not {refusal.code for refusal in traced.network.refusals} & {"opaque", "alias", "type-question", "state"}


@pytest.mark.parametrize(
    ("run", "code", "line"),
    [
        (is_of_type, "type-question", "type(x) is torch.Tensor"),
        (has_attribute, "type-question", "hasattr(x"),
        (try_iteration, "caught-error", "try:"),
        (try_float, "caught-error", "try:"),
    ],
)
def test_forward_that_cannot_be_recorded_is_refused_with_its_line(run, code, line):
    class Top(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = conv(), conv()

    Top.forward = run
    with pytest.raises(
        TraceError, match=r"The forward of Top cannot be recorded: .*test_misleading_forwards.py:\d+"
    ) as caught:
        df.trace(Top(), image())
    assert line in str(caught.value)
    assert 'at="..."' in str(caught.value)

    class Part(Top):
        forward = run

    traced = merges_exactly(nn.Sequential(conv(), nn.ReLU(), Part(), conv()))
    assert traced.depth == 2
    assert {refusal.where: refusal.code for refusal in traced.network.refusals if refusal.position} == {"2": code}


# Common code that older versions refused.


def test_slices_of_a_sequential_are_recorded():
    body = nn.Sequential(conv(), nn.ReLU(), conv(), nn.ReLU(), conv())
    traced = merges_exactly(Net(lambda net, x: net.f[3:](net.f[:3](x)), f=body))
    assert [layer.where for layer in traced.network.layers] == ["f.0", "f.2", "f.4"]


def test_module_names_may_be_keywords():
    parts = nn.ModuleDict({"in": conv(), "class": conv()})
    traced = merges_exactly(Net(lambda net, x: net.d["class"](F.relu(net.d["in"](x))), d=parts))
    assert list(df.rewrite(traced, traced.vanilla).state_dict()) == [
        "d.in.weight", "d.in.bias", "d.class.weight", "d.class.bias"
    ]  # fmt: skip
