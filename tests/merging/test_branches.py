"""Sums of parallel linear branches are one layer, in any order, and are merged exactly."""

from itertools import permutations
from random import Random

import pytest
import timm
import torch
from timm.utils.model import reparameterize_model
from torch import nn

import depthfold as df
from depthfold.testing import random_plan, randomise_statistics
from nets import Net, agree, codes, conv, folds_exactly, image
from parallel import Between, conv_bn, convolutions, is_one_layer, merged


class RepVGG(nn.Module):
    def __init__(self, ins=4, outs=4, stride=1, groups=1):
        super().__init__()
        self.dense = conv_bn(ins, outs, 3, stride=stride, groups=groups)
        self.point = conv_bn(ins, outs, 1, stride=stride, groups=groups)
        self.identity = nn.BatchNorm2d(ins) if ins == outs and stride == 1 else None

    def forward(self, x):
        identity = 0 if self.identity is None else self.identity(x)
        return self.dense(x) + self.point(x) + identity


class MobileOne(nn.Module):
    """The order of FastViT and of the authors: the small branches are summed before the large ones."""

    def __init__(self, branches=3, stride=1, groups=4):
        super().__init__()
        self.identity = nn.BatchNorm2d(4) if stride == 1 else None
        self.scale = conv_bn(kernel=1, stride=stride, groups=groups)
        self.large = nn.ModuleList(conv_bn(kernel=3, stride=stride, groups=groups) for _ in range(branches))

    def forward(self, x):
        out = self.scale(x) + (0 if self.identity is None else self.identity(x))
        for branch in self.large:
            out += branch(x)
        return out


class ACNet(nn.Module):
    """The asymmetric branches are summed first, and neither kernel contains the other."""

    def __init__(self):
        super().__init__()
        self.square = conv_bn()
        self.wide = nn.Sequential(nn.Conv2d(4, 4, (1, 3), padding=(0, 1), bias=False), nn.BatchNorm2d(4))
        self.high = nn.Sequential(nn.Conv2d(4, 4, (3, 1), padding=(1, 0), bias=False), nn.BatchNorm2d(4))

    def forward(self, x):
        return (self.wide(x) + self.high(x)) + self.square(x)


BLOCKS = {
    "RepVGG": (lambda: RepVGG(), 3),
    "RepVGG in groups": (lambda: RepVGG(groups=2), 3),
    "RepVGG with a stride": (lambda: RepVGG(stride=2), 2),
    "YOLOv6, wider": (lambda: RepVGG(4, 6), 2),
    "MobileOne": (lambda: MobileOne(), 5),
    "MobileOne with one large branch": (lambda: MobileOne(branches=1), 3),
    "MobileOne with a stride": (lambda: MobileOne(stride=2), 4),
    "MobileOne without groups": (lambda: MobileOne(groups=1), 5),
    "ACNet": (lambda: ACNet(), 3),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_block_in_training_form_is_one_layer(name):
    build, terms = BLOCKS[name]
    is_one_layer(build(), outs=6 if "wider" in name else 4, terms=terms)


@pytest.mark.parametrize("name", ["repvgg_a0", pytest.param("mobileone_s0", marks=pytest.mark.slow)])
def test_timm_model_is_merged_into_its_deployed_form(name):
    torch.manual_seed(0)
    model = randomise_statistics(timm.create_model(name, num_classes=7)).double().eval()
    x = torch.randn(1, 3, 65, 65, dtype=torch.float64)
    traced = df.trace(model, x)
    deployed = reparameterize_model(model)
    shallow = merged(traced)
    assert convolutions(shallow) == convolutions(deployed) == traced.depth < convolutions(model)
    with torch.no_grad():
        agree(shallow(x), model(x))
        agree(shallow(x), deployed(x))


def test_fastvit_stem_is_merged_into_its_deployed_form():
    model = randomise_statistics(timm.create_model("fastvit_t8", num_classes=7).stem).double().eval()
    x = torch.randn(1, 3, 65, 65, dtype=torch.float64)
    traced = df.trace(model, x)
    assert (traced.depth, traced.network.barriers) == (3, ())
    deployed, shallow = reparameterize_model(model), merged(traced)
    assert convolutions(shallow) == convolutions(deployed) == 3
    with torch.no_grad():
        agree(shallow(x), deployed(x))


TERMS = {
    "large": conv_bn,
    "point": lambda: conv_bn(kernel=1),
    "identity": nn.Identity,
    "norm": lambda: nn.BatchNorm2d(4),
}
NESTINGS = {
    "to the left": lambda a, b, c, d: ((a + b) + c) + d,
    "to the right": lambda a, b, c, d: a + (b + (c + d)),
    "in pairs": lambda a, b, c, d: (a + b) + (c + d),
    "in the middle": lambda a, b, c, d: (a + (b + c)) + d,
}


@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.parametrize("order", list(permutations(TERMS)), ids=" ".join)
def test_order_of_the_sum_does_not_matter(nesting, order):
    torch.manual_seed(0)
    parts = {name: build() for name, build in TERMS.items()}
    model = Net(
        lambda net, x: net.last(NESTINGS[nesting](*(getattr(net, name)(x) for name in order)).relu()),
        last=conv(),
        **parts,
    )
    traced = folds_exactly(model, image(9), plans=1)
    assert (traced.depth, traced.network.barriers, len(traced.network.skips)) == (2, (), 3)
    assert convolutions(merged(traced)) == 2


def test_in_place_sums_are_one_layer():
    def run(net, x):
        small = net.point(x)
        small += net.norm(x)
        return net.last(net.large(x).add_(small).relu_())

    model = Net(run, point=conv_bn(kernel=1), norm=nn.BatchNorm2d(4), large=conv_bn(), last=conv())
    traced = folds_exactly(model, image(9))
    assert (traced.depth, traced.network.barriers, len(traced.network.skips)) == (2, (), 2)


def test_sum_that_is_read_before_it_is_overwritten_stays():
    def run(net, x):
        small = net.point(x)
        total = small + 1
        small += net.norm(x)
        return net.last((net.large(x) + small).relu()) + total

    model = Net(run, point=conv_bn(kernel=1), norm=nn.BatchNorm2d(4), large=conv_bn(), last=conv())
    folds_exactly(model, image(9))


def test_branch_that_is_read_elsewhere_stays():
    def run(net, x):
        point = net.point(x)
        return net.last((net.large(x) + (point + x)).relu()), point

    model = Net(run, point=conv_bn(kernel=1), large=conv_bn(), last=conv())
    model, x = randomise_statistics(model).double().eval(), image(9).double()
    traced = df.trace(model, x)
    assert not traced.network.skips
    with torch.no_grad():
        for found, wanted in zip(merged(traced)(x), model(x), strict=True):
            agree(found, wanted)


def test_branch_that_is_added_twice_is_exact():
    model = Net(
        lambda net, x: net.last(twice(net.large(x), net.point(x)).relu()),
        large=conv_bn(),
        point=conv_bn(kernel=1),
        last=conv(),
    )

    def twice(large, point):
        return large + (point + point)

    folds_exactly(model, image(9))


def test_value_that_is_added_to_itself_is_a_layer():
    def run(net, x):
        y = net.a(x)
        return net.b((y + y).relu())

    assert folds_exactly(Net(run, a=conv(), b=conv()), image(9)).depth == 2


def test_sum_with_a_term_outside_the_kernel_stays():
    block = Net(
        lambda net, x: net.large(x) + (net.point(x) + net.pool(x)),
        large=conv(),
        point=conv(kernel=1),
        pool=nn.AvgPool2d(5, 1, 2),
    )
    traced = folds_exactly(Between(block), image(9))
    assert not traced.network.skips
    assert "side-addition" in codes(traced).values()


def test_later_operations_read_the_in_place_sum():
    def run(net, x):
        x = net.first(x).relu()
        small = x.add_(net.norm(x))
        return net.last((net.large(x) + small).relu())

    model = Net(run, first=conv(), norm=nn.BatchNorm2d(4), large=conv_bn(), last=conv())
    (skip,) = folds_exactly(model, image(9)).network.skips
    assert (skip.source, skip.target, skip.projection) == (1, 2, None)


def test_norm_after_a_sum_is_not_folded_into_its_terms():
    model = Net(
        lambda net, x: net.last((net.large(x) + net.norm(net.point(x) + net.other(x))).relu()),
        large=conv_bn(),
        point=conv_bn(kernel=1),
        other=conv_bn(kernel=1),
        norm=nn.BatchNorm2d(4),
        last=conv(),
    )
    assert folds_exactly(model, image(9)).network.barriers


def test_terms_from_different_values_are_not_one_branch():
    def run(net, x):
        h = net.a(x).relu()
        return net.b(h) + (net.c(h) + net.d(x))

    model = Net(run, a=conv(), b=conv(), c=conv(kernel=1), d=conv(kernel=1))
    folds_exactly(model, image(9))


# Branches parallel to a longer path, with the number of convolutions that remain if the addition stays.
BESIDE = {
    "a sum": (lambda net, x: net.a(x) + net.b(x), 1),
    "a sum in place": (lambda net, x: net.b(x).add_(net.a(x)), 1),
    "a sum with the identity": (lambda net, x: net.a(x) + (x + net.b(x)), 1),
    "a sum with a norm": (lambda net, x: net.a(x) + (x + net.norm(x)), 1),
    "a sum of norms": (lambda net, x: x + net.norm(x), 0),
    "a sum with a pool": (lambda net, x: net.pool(x) + (net.a(x) + net.b(x)), 1),
    "branches that do not contain each other": (lambda net, x: net.wide(x) + net.high(x), 2),
}


@pytest.mark.parametrize("name", BESIDE)
def test_branches_parallel_to_a_longer_path(name):
    def run(net, x):
        x = net.zero(x).relu()
        return net.last((net.two(net.one(x).relu()) + beside(net, x)).relu())

    beside, remaining = BESIDE[name]
    parts = dict(zero=conv(), one=conv_bn(), two=conv_bn(), last=conv(), a=conv_bn(kernel=1), b=conv_bn())
    sides = dict(wide=nn.Conv2d(4, 4, (1, 3), padding=(0, 1)), high=nn.Conv2d(4, 4, (3, 1), padding=(1, 0)))
    model = Net(run, **parts, **sides, norm=nn.BatchNorm2d(4), pool=nn.AvgPool2d(3, 1, 1))
    traced = folds_exactly(model, image(11), plans=8)
    assert (traced.depth, traced.network.barriers) == (4, ())
    assert {(skip.source, skip.target) for skip in traced.network.skips} == {(1, 3)}
    assert convolutions(merged(traced)) == 4 + remaining
    assert convolutions(merged(traced, df.Plan((1,), (1, 3)))) == 3


@pytest.mark.parametrize("plan", [df.Plan((1, 2, 3), (1, 2, 3)), df.Plan((1,), (1, 3)), df.Plan((), ())], ids=str)
def test_remaining_branches_can_be_saved_and_loaded(tmp_path, plan):
    def model(seed):
        torch.manual_seed(seed)
        beside = Net(lambda net, x: net.a(x) + net.b(x), a=conv_bn(kernel=1), b=conv_bn())
        row = nn.Sequential(conv_bn(), nn.ReLU(), conv_bn())
        block = Net(lambda net, x: net.row(x) + net.beside(x), row=row, beside=beside)
        return randomise_statistics(nn.Sequential(conv(), nn.ReLU(), block, nn.ReLU(), conv()), seed).eval()

    shallow = merged(df.trace(model(0), image(9)), plan)
    again = df.load(df.save(shallow, tmp_path), model(1))
    with torch.no_grad():
        assert torch.equal(again(image(9)), shallow(image(9)))


def test_convolutions_parallel_to_a_longer_path_are_layers():
    def run(net, x):
        x = net.zero(x).relu()
        return net.last((net.two(net.one(x).relu()) + net.b(net.a(x))).relu())

    model = Net(run, zero=conv(), one=conv(), two=conv(), last=conv(), a=conv(kernel=1), b=conv(kernel=1))
    traced = folds_exactly(model, image(9))
    assert (traced.depth, len(traced.network.skips)) == (6, 0)


def test_student_keeps_all_branches_and_their_names():
    model = randomise_statistics(Between(MobileOne())).double().eval()
    x = image(9).double()
    traced = df.trace(model, x)
    for plan in (df.Plan((), ()), traced.vanilla):
        student = df.rewrite(traced, plan)
        assert set(student.state_dict()) == set(model.state_dict())
        student.train()
        student(x).square().mean().backward()
        assert all(parameter.grad is not None for parameter in student.parameters())
        student.eval()
        shallow = df.merge(student)
        assert convolutions(shallow) == len(traced.network.segments(plan))
        assert not any(isinstance(part, nn.BatchNorm2d) for part in shallow.modules())
        with torch.no_grad():
            agree(shallow(x), student(x))


def test_random_plans_of_a_network_of_blocks_are_exact():
    torch.manual_seed(0)
    blocks = [RepVGG(4, 4), MobileOne(), ACNet(), RepVGG(4, 6, stride=2), RepVGG(6, 6, groups=2)]
    model = nn.Sequential(*(part for block in blocks for part in (block, nn.ReLU())))
    model, x = randomise_statistics(model).double().eval(), image(17).double()
    traced = df.trace(model, x)
    assert (traced.depth, traced.network.barriers) == (5, ())
    assert len(traced.spans("full")) == 15
    with torch.no_grad():
        agree(merged(traced)(x), model(x))
        for seed in range(12):
            student = df.rewrite(traced, random_plan(traced.network, Random(seed)))
            for size in (17, 20):
                inputs = image(size, seed=seed).double()
                agree(df.merge(student)(inputs), student(inputs))
