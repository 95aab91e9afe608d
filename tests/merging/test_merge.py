"""merge(): the shallow network computes the same as the student."""

import copy
from random import Random

import pytest
import torch
import torch.nn.functional as F
from timm.layers import BatchNormAct2d, DropPath
from timm.layers.activations import GELUTanh
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision import models
from torchvision.ops import FrozenBatchNorm2d

import depthfold as df
from depthfold.testing import random_plan, randomise_statistics
from merged import folded, small
from nets import Net, agree, conv, image, only

REAL = {
    "mobilenet_v2": lambda: models.mobilenet_v2(weights=None, num_classes=10, width_mult=0.5),
    "mobilenet_v2 1.0": lambda: models.mobilenet_v2(weights=None, num_classes=10),
    "basic blocks": lambda: models.ResNet(models.resnet.BasicBlock, [2, 1, 1, 1], num_classes=10),
    "bottlenecks": lambda: models.ResNet(models.resnet.Bottleneck, [1, 2, 1, 1], num_classes=10, width_per_group=16),
    "grouped bottlenecks": lambda: models.ResNet(
        models.resnet.Bottleneck, [1, 1, 1, 1], num_classes=10, groups=4, width_per_group=8
    ),
}


def build(name, dtype=torch.float64):
    torch.manual_seed(1)
    return randomise_statistics(REAL[name](), seed=2).to(dtype).eval()


SLOW = {"mobilenet_v2 1.0": pytest.mark.slow}


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in REAL])
def test_real_networks_merge_exactly_in_float64_at_odd_sizes(name):
    model = build(name)
    x = torch.randn(1, 3, 65, 65, dtype=torch.float64)
    traced = df.trace(model, x)
    with torch.no_grad():
        agree(df.merge(df.rewrite(traced, traced.vanilla))(x), model(x))
        for seed in range(3):
            plan = random_plan(traced.network, Random(seed), largest=150_000)
            student = df.rewrite(traced, plan)
            shallow = df.merge(student)
            for size in ((65, 65), (64, 71)):
                x = torch.randn(1, 3, *size, dtype=torch.float64)
                agree(shallow(x), student(x))
            convs = [part for part in shallow.modules() if isinstance(part, nn.Conv2d)]
            segments = traced.network.segments(plan)
            explicit = sum(
                skip.projection is not None and not any(s.contains(skip.span) for s in segments)
                for skip in traced.network.skips
            )
            assert len(convs) == len(segments) + explicit
            assert all(part.bias is not None for part in convs)
            assert not any(isinstance(part, _BatchNorm) for part in shallow.modules())


@pytest.mark.parametrize("name", ["mobilenet_v2", "basic blocks"])
def test_real_networks_merge_in_float32(name):
    model = build(name, torch.float32)
    x = torch.randn(2, 3, 65, 65)
    traced = df.trace(model, x)
    with torch.no_grad():
        for seed in range(2):
            student = df.rewrite(traced, random_plan(traced.network, Random(seed), largest=150_000))
            shallow = df.merge(student)
            agree(shallow(x), student(x), 1e-4)
            assert {parameter.dtype for parameter in shallow.parameters()} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_composed_in_float64_and_converted_back(dtype):
    model = randomise_statistics(small()).to(dtype).eval()
    x = image().to(dtype)
    traced = df.trace(model, x)
    student = df.rewrite(traced, df.Plan((), ()))
    shallow = df.merge(student)
    assert {parameter.dtype for parameter in shallow.parameters()} == {dtype}
    tolerance = {torch.bfloat16: 5e-2, torch.float16: 5e-3}[dtype]
    assert df.verify(student, shallow).tolerance == tolerance
    double = df.merge(df.rewrite(df.trace(copy.deepcopy(model).double(), x.double()), df.Plan((), ())))
    for found, wanted in zip(shallow.parameters(), double.parameters(), strict=True):
        assert torch.equal(found, wanted.to(dtype))
    with torch.no_grad():
        agree(shallow(x).float(), student(x).float(), 2 * tolerance)


def test_every_segment_is_one_convolution_and_other_batch_norms_are_folded():
    student, shallow, x = folded()
    convs = [part for part in shallow.modules() if isinstance(part, nn.Conv2d)]
    assert len(convs) == 2  # the stem, and the layers after the pool
    assert convs[1].kernel_size == (7, 7)
    assert not any(isinstance(part, _BatchNorm | nn.Dropout) for part in shallow.modules())
    with torch.no_grad():
        agree(shallow(x), student(x))


def test_batch_norms_of_an_ignored_stem_and_head_are_folded():
    model = nn.Sequential(
        conv(),
        nn.BatchNorm2d(4, eps=0.2),
        nn.ReLU(),
        conv(),
        nn.ReLU(),
        conv(),
        BatchNormAct2d(4),
        conv(),
        FrozenBatchNorm2d(4),
    )
    randomise_statistics(model).double().eval()
    x = image().double()
    traced = df.trace(model, x, ignore=["0", "1", "7", "8"])
    assert traced.depth == 2
    student = df.rewrite(traced, traced.vanilla)
    shallow = df.merge(student)
    kinds = [type(part) for part in shallow.modules() if not list(part.children())]
    assert sorted(kind.__name__ for kind in kinds) == ["Conv2d"] * 4 + ["ReLU"] * 3
    with torch.no_grad():
        agree(shallow(x), model(x))


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(conv(), BatchNormAct2d(4), DropPath(0.1), conv(), BatchNormAct2d(4, act_layer=nn.SiLU), conv()),
        nn.Sequential(conv(), BatchNormAct2d(4), nn.MaxPool2d(2), conv(), FrozenBatchNorm2d(4), nn.ReLU()),
        nn.Sequential(BatchNormAct2d(4), conv(), BatchNormAct2d(4), conv()),
    ],
    ids=["inside", "around a pool", "before the first convolution"],
)
def test_merged_network_has_only_pytorch_modules(model):
    randomise_statistics(model).double().eval()
    traced = df.trace(model, image().double())
    for plan in (traced.vanilla, df.Plan((), ())):
        shallow = df.merge(df.rewrite(traced, plan))
        others = {type(part).__name__ for part in shallow.modules() if not type(part).__module__.startswith("torch.")}
        assert others <= {type(shallow).__name__}
        assert not any(isinstance(part, DropPath) for part in shallow.modules())


def test_groups_are_kept_if_possible():
    model = nn.Sequential(
        conv(12, 12, groups=12),
        nn.ReLU(),
        conv(12, 12, groups=12),
        nn.ReLU(),
        conv(12, 24, groups=4),
        nn.ReLU(),
        conv(24, 8),
    )
    x = image(channels=12).double()
    model.double().eval()
    traced = df.trace(model, x)
    for (i, j), groups in {(0, 2): 12, (1, 3): 4, (0, 3): 4, (2, 4): 1, (0, 4): 1}.items():
        shallow = df.merge(df.rewrite(traced, only(traced, i, j)))
        merged = shallow.get_submodule(traced.network.layers[i].where)
        assert merged.groups == groups
        assert merged.weight.shape[1] == 12 // groups


def test_depthwise_residual_stays_depthwise():
    model = Net(lambda net, x: net.b(F.relu(net.a(x))) + x, a=conv(groups=4), b=conv(groups=4))
    student, shallow, x = folded(model)
    (merged,) = [part for part in shallow.modules() if isinstance(part, nn.Conv2d)]
    assert (merged.groups, merged.kernel_size) == (4, (5, 5))
    with torch.no_grad():
        agree(shallow(x), student(x))


def test_asymmetric_padding_is_merged():
    model = nn.Sequential(
        nn.ZeroPad2d((0, 1, 2, 0)), nn.Conv2d(4, 4, 2), nn.ReLU(), nn.Conv2d(4, 4, (2, 4), padding="same")
    )
    student, shallow, x = folded(model)
    with torch.no_grad():
        agree(shallow(x), student(x))
    assert sum(isinstance(part, nn.Conv2d) for part in shallow.modules()) == 1


def test_contiguous_before_a_view_stays():
    model = Net(lambda net, x: net.b(F.relu(net.a(x))).permute(0, 2, 3, 1).contiguous().view(2, -1), a=conv(), b=conv())
    student, shallow, x = folded(model)
    with torch.no_grad():
        agree(shallow(x), student(x))


def convolution_calls(shallow):
    """Return the number of convolutions that run, because unused convolutions must not be called."""
    calls = []
    handles = [
        part.register_forward_hook(lambda *_: calls.append(1))
        for part in shallow.modules()
        if isinstance(part, nn.Conv2d)
    ]
    shallow(image().double())
    for handle in handles:
        handle.remove()
    return len(calls)


@pytest.mark.parametrize("inplace", [True, False])
def test_segment_that_ends_with_a_norm_that_contains_an_activation(inplace):
    torch.manual_seed(0)
    act = dict(act_layer=nn.ReLU, inplace=inplace)
    model = nn.Sequential(
        nn.Conv2d(4, 6, 3, padding=1, bias=False), BatchNormAct2d(6, eps=1e-2, **act),
        nn.Conv2d(6, 6, 3, padding=1, groups=6), BatchNormAct2d(6, **act),
        nn.Conv2d(6, 5, 1), BatchNormAct2d(5, **act),
    )  # fmt: skip
    randomise_statistics(model).double().eval()
    traced = df.trace(model, image().double())
    for plan in (traced.vanilla, df.Plan((), ()), df.Plan((2,), (2,)), df.Plan((1,), (1,))):
        student = df.rewrite(traced, plan)
        shallow = df.merge(student)
        agree(shallow(image().double()), student(image().double()))
        assert convolution_calls(shallow) == len(traced.network.segments(plan))


def test_norms_and_activations_of_timm_outside_segments_keep_their_values():
    torch.manual_seed(0)
    model = nn.Sequential(
        BatchNormAct2d(4, eps=0.3, act_layer=nn.ReLU), GELUTanh(), nn.AvgPool2d(2), nn.Conv2d(4, 4, 1)
    )
    randomise_statistics(model).double().eval()
    traced = df.trace(model, image().double())
    shallow = df.merge(df.rewrite(traced, traced.vanilla))
    agree(shallow(image().double()), model(image().double()))


def test_convolution_with_two_norms_is_not_folded():
    torch.manual_seed(0)
    stem, one, two = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4, eps=0.5)
    model = Net(
        lambda net, x: net.last(torch.cat([net.one(net.stem(x)), net.two(net.stem(x))], 1)),
        stem=stem, one=one, two=two, last=nn.Conv2d(8, 4, 1),
    )  # fmt: skip
    randomise_statistics(model).double().eval()
    traced = df.trace(model, image().double())
    agree(df.merge(df.rewrite(traced, traced.vanilla))(image().double()), model(image().double()))


def test_convolution_that_is_read_elsewhere_is_not_folded():
    torch.manual_seed(0)
    model = Net(
        lambda net, x: (lambda y: torch.cat([net.norm(y), y.abs()], 1))(net.stem(x)),
        stem=nn.Conv2d(4, 4, 1), norm=nn.BatchNorm2d(4),
    )  # fmt: skip
    randomise_statistics(model).double().eval()
    traced = df.trace(model, image().double(), ignore=["stem", "norm"])
    agree(df.merge(df.rewrite(traced, df.Plan((), ())))(image().double()), model(image().double()))


def test_network_that_was_merged_in_inference_mode_can_be_trained():
    traced = df.trace(Net(lambda net, x: net.b(net.a(x)), a=conv(), b=conv()).eval(), image())
    with torch.inference_mode():
        shallow = df.merge(df.rewrite(traced, df.Plan((), ())))
    shallow(image()).sum().backward()
    assert all(parameter.grad is not None for parameter in shallow.parameters())
