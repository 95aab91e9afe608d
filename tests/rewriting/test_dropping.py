"""rewrite() with dropped layers and branches: compared with models in which the user replaces modules by hand."""

import copy

import pytest
import torch
import torch.nn.functional as F
from timm.layers import BatchNormAct2d
from torch import nn

import depthfold as df
from depthfold.core import Drops, Network, Span
from depthfold.errors import PlanError
from depthfold.testing import randomise_statistics
from nets import Net, agree, conv, image


def double(model):
    return randomise_statistics(model).double().eval()


def dropped(model, layers=(), branches=(), x=None):
    """Return the student of the vanilla plan without these layers and branches, after its merged network is checked."""
    x = image().double() if x is None else x
    traced = df.trace(model, x.clone())
    drops = Drops(layers, [Span(*branch) for branch in branches])
    inside = {position for branch in drops.branches for position in branch.inner}
    plan = df.Plan(traced.network.activations - inside, set(traced.vanilla.cuts) - inside, drops)
    student = df.rewrite(traced, plan)
    with torch.no_grad():
        agree(df.merge(student)(x.clone()), student(x.clone()))
    return student


def by_hand(model, *names):
    """Return the model with identities in place of these modules."""
    changed = copy.deepcopy(model)
    for name in names:
        changed.set_submodule(name, nn.Identity())
    return changed


def same(student, wanted, x=None):
    x = image().double() if x is None else x
    with torch.no_grad():
        agree(student(x.clone()), wanted(x.clone()))


class Basic(nn.Module):
    """A basic block whose in-place activation is called twice, as in torchvision."""

    def __init__(self, inplace=True):
        super().__init__()
        self.conv1, self.bn1, self.conv2, self.bn2 = conv(), nn.BatchNorm2d(4), conv(), nn.BatchNorm2d(4)
        self.act = nn.LeakyReLU(0.3, inplace=inplace)  # applied twice, it is another function

    def forward(self, x):
        y = self.act(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x
        return self.act(y)


def blocks(**given):
    torch.manual_seed(0)
    return double(nn.Sequential(conv(), nn.LeakyReLU(0.5, inplace=True), Basic(**given), Basic(**given)))


def test_dropped_layers_compute_the_identity_and_in_place_activations_do_not_overwrite_the_skip():
    student = dropped(blocks(), layers=(2, 5))
    wanted = by_hand(blocks(inplace=False), "2.conv1", "2.bn1", "3.conv2", "3.bn2")
    wanted[1].inplace = False
    same(student, wanted)
    names = {name for name in blocks().state_dict() if not name.startswith(("2.conv1", "2.bn1", "3.conv2", "3.bn2"))}
    assert set(student.state_dict()) == names
    student.train()(image().double()).sum().backward()  # an overwritten value has no gradient
    assert all(parameter.grad is not None for parameter in student.parameters())


def test_first_layer_does_not_overwrite_the_input():
    x = image().double()
    student, before = dropped(double(nn.Sequential(conv(), nn.ReLU(inplace=True), conv())), layers=(1,)), x.clone()
    student(x)
    assert torch.equal(x, before)


def test_dropped_branch_leaves_its_skip_and_the_activation_after_it():
    student, model = dropped(blocks(), branches=[(1, 3)]), blocks(inplace=False)
    same(student, lambda x: model[3](F.leaky_relu(F.leaky_relu(model[0](x), 0.5), 0.3)))
    assert not [name for name in student.state_dict() if name.startswith("2.")]
    assert not [name for name, _ in student.named_modules() if name.startswith(("2.conv", "2.bn"))]


def test_activation_after_a_dropped_branch_does_not_overwrite_the_start_of_an_outer_residual():
    def run(net, x):
        x = net.first(x)
        return net.last(F.relu(net.inner(x), inplace=True)) + x

    torch.manual_seed(0)
    model = double(Net(run, first=conv(), inner=Residual(), last=conv()))
    same(dropped(model, branches=[(1, 3)]), lambda x: model.last(F.relu(model.first(x))) + model.first(x))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = conv(), conv()

    def forward(self, x):
        return self.b(self.a(x)) + x


WRITING = {
    "keyword": lambda x: F.relu(x, inplace=True),
    "argument": lambda x: F.relu(x, True),
    "function": torch.relu_,
    "method": lambda x: x.relu_(),
    "foreign": lambda x: x.mul_(torch.sigmoid(x)),
}


@pytest.mark.parametrize("kind", WRITING)
def test_functions_that_write_in_place_do_not_overwrite_an_earlier_value(kind):
    def run(net, x):
        x = net.first(x)
        return torch.cat([WRITING[kind](net.one(x)), net.two(x)], 1)

    torch.manual_seed(0)
    model = double(Net(run, first=conv(), one=conv(), two=conv()))

    def wanted(x):
        x = model.first(x)
        return torch.cat([WRITING[kind](x.clone()), model.two(x)], 1)

    same(dropped(model, layers=(2,)), wanted)


def test_parameters_of_dropped_functional_layers_leave_the_state_dict():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = (nn.Parameter(torch.randn(4, 4, 3, 3)) for _ in range(2))
            self.bias = nn.Parameter(torch.randn(4))
            self.norm = nn.BatchNorm2d(4)

        def forward(self, x):
            x = F.relu(F.conv2d(x, self.one, self.bias, padding=1))
            n = self.norm
            x = F.batch_norm(F.conv2d(x, self.two, padding=1), n.running_mean, n.running_var, n.weight, n.bias)
            return x + 0

    model = double(Functional())
    student = dropped(model, layers=(2,))
    assert set(student.state_dict()) == {"one", "bias"}
    same(student, lambda x: F.relu(F.conv2d(x, model.one, model.bias, padding=1)))
    assert set(dropped(model, layers=(1,)).state_dict()) == set(model.state_dict()) - {"one", "bias"}


def test_activation_inside_a_dropped_batch_norm_stays():
    torch.manual_seed(0)
    model = double(nn.Sequential(conv(), BatchNormAct2d(4), conv(), BatchNormAct2d(4, act_layer=nn.PReLU), conv()))
    with torch.no_grad():
        model[3].act.weight.fill_(-0.5)  # it changes what the first activation returns
    x = image().double()
    student = dropped(model, layers=(2,))
    same(student, lambda x: model[4](model[3].act(model[1](model[0](x)))))
    assert "3.act.weight" in student.state_dict() and "3.weight" not in student.state_dict()
    traced = df.trace(model, x)
    for plan in (df.Plan((), (), Drops([2])), df.Plan((), (1, 2), Drops([2])), df.Plan((2,), (2,), Drops([2]))):
        without = df.rewrite(traced, plan).eval()
        agree(df.merge(without)(x), without(x))
        assert ("3.act.weight" in without.state_dict()) == (2 in plan.activations)


def test_dropout_after_a_dropped_layer_does_not_overwrite_the_skip():
    def run(net, x):
        x = net.a(x)
        return net.c(net.act(net.drop(net.b(x)))) + x

    torch.manual_seed(0)
    parts = dict(a=conv(), b=conv(), c=conv(), drop=nn.Dropout(0.5, inplace=True), act=nn.ReLU(inplace=True))
    model = double(Net(run, **parts))
    student = dropped(model, layers=(2,))
    same(student, lambda x: model.c(F.relu(model.a(x))) + model.a(x))
    student.train()(image().double()).sum().backward()


def test_activation_inside_a_dropped_batch_norm_does_not_overwrite_the_skip():
    def run(net, x):
        x = net.a(x)
        return net.c(net.norm(net.b(x))) + x

    torch.manual_seed(0)
    model = double(Net(run, a=conv(), b=conv(), c=conv(), norm=BatchNormAct2d(4)))
    assert model.norm.act.inplace
    same(dropped(model, layers=(2,)), lambda x: model.c(F.relu(model.a(x))) + model.a(x))


def test_wrapper_around_a_dropped_convolution_keeps_its_parts():
    class Wrapper(nn.Conv2d):  # as in detectron2
        def __init__(self):
            super().__init__(4, 4, 3, padding=1)
            self.norm, self.activation = nn.BatchNorm2d(4), nn.PReLU()

        def forward(self, x):
            x = F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)
            return self.activation(self.norm(x))

    torch.manual_seed(0)
    model = double(nn.Sequential(Wrapper(), Wrapper()))
    student = dropped(model, layers=(2,))
    assert {name for name in student.state_dict() if name.startswith("1.")} == {"1.activation.weight"}
    same(student, lambda x: model[1].activation(model[0](x)))


def test_projection_before_the_first_kept_layer_is_padded_before_its_bias():
    def run(net, x):
        return net.after(net.b(net.a(x)) + net.norm(net.skip(x)))

    torch.manual_seed(0)
    parts = dict(a=conv(), b=conv(), skip=conv(kernel=1), norm=nn.BatchNorm2d(4), after=conv(kernel=5))
    model = double(Net(run, **parts))
    x = image().double()
    student = df.rewrite(df.trace(model, x), df.Plan((), (), Drops([1, 2])))
    wide = F.pad(x, (2, 2, 2, 2))
    wanted = F.conv2d(wide + model.norm(model.skip(wide)), model.after.weight, model.after.bias)
    with torch.no_grad():
        agree(student(x), wanted)
        agree(df.merge(student)(x), wanted)


@pytest.mark.parametrize(
    ("drops", "message"),
    [
        (Drops([1, 2]), r"drops all layers of the segment \(0, 2\], so that only the addition of its residual would"),
        (Drops([3]), r"drops layer 3, which changes the number of channels or the size"),
        (Drops([4, 5]), r"The skip 3 -> 5 exceeds what is left of its branch"),
        (
            Drops(branches=[Span(3, 5)]),
            r"drops the branch \(3, 5\], which is not that of a residual that adds only",
        ),
    ],
)
def test_impossible_drops_are_refused(drops, message):
    def run(net, x):
        x = net.c(net.b(net.a(x)) + x)
        return net.g(net.e(net.d(x)) + net.skip(x))

    shapes = dict(a=conv(), b=conv(), c=conv(4, 6), d=conv(6, 6), e=conv(6, 6), skip=conv(6, 6), g=conv(6, 6))
    traced = df.trace(Net(run, **shapes), image())
    cuts = (2, 3) if drops.layers == (1, 2) else (3,)
    with pytest.raises(PlanError, match=message):
        df.rewrite(traced, df.Plan((), cuts, drops))


def with_side(before):
    """A residual to which another value is also added, before the skip or after it."""

    def run(net, x):
        side = net.side(x[:, :, 1:-1])
        x = net.stem(x)
        branch = net.b(net.a(x))
        return branch + side + x if before else branch + x + side

    torch.manual_seed(0)
    side = nn.Conv2d(4, 4, (1, 3), padding=(1, 1))
    return double(Net(run, side=side, stem=conv(), a=conv(), b=conv()))


def test_branch_to_which_another_value_is_added_first_cannot_be_dropped():
    """The other value would be lost with the branch."""
    traced = df.trace(with_side(before=True), image().double())
    (skip,) = traced.network.skips
    assert skip.side
    assert not traced.network.droppable_branches
    assert Network.loads(traced.network.dumps()) == traced.network
    with pytest.raises(PlanError, match=r"that adds only the identity\. Drop only"):
        df.rewrite(traced, df.Plan((), set(range(1, 4)) - set(skip.span.inner), Drops(branches=[skip.span])))


def test_value_that_is_added_after_the_skip_stays():
    model, x = with_side(before=False), image().double()
    traced = df.trace(model, x)
    (branch,) = traced.network.droppable_branches
    student = df.rewrite(traced, df.Plan((), set(range(1, 4)) - set(branch.inner), Drops(branches=[branch])))
    with torch.no_grad():
        wanted = model.stem(x) + model.side(x[:, :, 1:-1])
        agree(student(x), wanted)
        agree(df.merge(student)(x), wanted)
