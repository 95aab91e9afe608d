"""Which operations the kernels compute together, and which stay as they are. None of this needs Triton."""

import operator
import subprocess
import sys
from math import inf

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from depthfold.kernels import fuse, fuse_eval
from depthfold.kernels.sites import find_sites
from nets import Net


def sites_of(*layers, training=True):
    model = layers[0] if len(layers) == 1 else nn.Sequential(*layers)
    return find_sites(fx.symbolic_trace(model), training=training)


def norms_of(*layers, **given):
    return list(sites_of(*layers, **given).norms.values())


def depthwise(channels=16, **given):
    return nn.Conv2d(channels, channels, 3, **dict(padding=1, groups=channels, bias=False) | given)


def added(operation):
    """A network that applies the operation to its input and a batch norm of it."""
    return Net(lambda net, x: operation(x, net.norm(x)), norm=nn.BatchNorm2d(8))


@pytest.mark.parametrize(
    ("activation", "cap"),
    [
        (nn.ReLU(), inf), (nn.ReLU(inplace=True), inf), (nn.ReLU6(), 6.0), (nn.SiLU(), None), (nn.LeakyReLU(), None),
        (nn.Hardtanh(0, 6), None), (nn.Identity(), None),
    ],
)  # fmt: skip
def test_activations_that_clamp_are_taken_over(activation, cap):
    (site,) = norms_of(nn.BatchNorm2d(8), activation)
    assert site.cap == cap
    assert len(site.chain) == (1 if cap is None else 2)


@pytest.mark.parametrize("activate", [F.relu, torch.relu, lambda x: x.relu(), lambda x: F.relu(x, inplace=True)])
def test_functional_activations_are_taken_over(activate):
    (site,) = norms_of(Net(lambda net, x: activate(net.norm(x)), norm=nn.BatchNorm2d(8)))
    assert site.cap == inf


@pytest.mark.parametrize(
    ("operation", "taken"),
    [
        (lambda x, y: x + y, True), (lambda x, y: y + x, True), (lambda x, y: torch.add(x, y), True),
        (lambda x, y: y.add(x), True), (lambda x, y: y.add(x, alpha=2), False), (lambda x, y: y + 1, False),
        (lambda x, y: y + y, False), (lambda x, y: y - x, False), (lambda x, y: (y + x) * y, False),
    ],
)  # fmt: skip
def test_additions_are_taken_over(operation, taken):
    (site,) = norms_of(added(operation))
    assert (site.residual is not None) == taken


@pytest.mark.parametrize(("operation", "taken"), [(lambda x, y: y + x, True), (lambda x, y: x + y, False)])
def test_addition_in_place_is_taken_over_if_it_changes_only_the_norm(operation, taken):
    graph = fx.symbolic_trace(added(operation))
    for node in graph.graph.nodes:
        if node.target is operator.add:
            node.target = operator.iadd  # torch.fx records x += y as an addition; other tracers do not
    (site,) = find_sites(graph, training=True).norms.values()
    assert (site.residual is not None) == taken


@pytest.mark.parametrize(
    ("pool", "taken"),
    [
        (nn.MaxPool2d(2), True), (nn.MaxPool2d((2, 2), 2), True), (nn.MaxPool2d(3, 2), False),
        (nn.MaxPool2d(2, 1), False), (nn.MaxPool2d(2, padding=1), False), (nn.MaxPool2d(2, ceil_mode=True), False),
        (nn.MaxPool2d(2, dilation=2), False), (nn.AvgPool2d(2), False),
    ],
)  # fmt: skip
def test_max_pools_of_size_two_are_taken_over(pool, taken):
    (site,) = norms_of(nn.BatchNorm2d(8), nn.ReLU(), pool)
    assert site.pool == taken


def test_value_that_is_read_twice_is_not_taken_over():
    norm = nn.BatchNorm2d(8)
    (site,) = norms_of(Net(lambda net, x: (lambda y: F.relu(y) * y)(net.norm(x)), norm=norm))
    assert site.cap is None


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(12), nn.BatchNorm2d(8, affine=False), nn.BatchNorm2d(8, track_running_stats=False),
        nn.BatchNorm2d(8, momentum=None), nn.BatchNorm2d(8).eval(), nn.BatchNorm2d(8).double(), nn.GroupNorm(2, 8),
    ],
)  # fmt: skip
def test_other_norms_stay_as_they_are(norm):
    assert norms_of(nn.Conv2d(8, 8, 3), norm, nn.ReLU()) == []


def test_norm_that_is_called_twice_stays_as_it_is():
    norm = nn.BatchNorm2d(8)
    assert norms_of(norm, nn.Conv2d(8, 8, 1), norm) == []


def test_only_norms_in_evaluation_mode_are_folded():
    layers = nn.BatchNorm2d(8), nn.BatchNorm2d(16).eval()
    assert [site.module for site in norms_of(*layers, training=False)] == [layers[1]]
    assert [site.module for site in norms_of(*layers, training=True)] == [layers[0]]


@pytest.mark.parametrize(
    ("conv", "kind"),
    [
        (depthwise(), "depthwise"), (depthwise(stride=2), "depthwise"), (depthwise(padding=(2, 0)), "depthwise"),
        (depthwise(stride=3), "other"), (depthwise(dilation=2), "other"), (depthwise(bias=True), "other"),
        (depthwise(stride=(1, 2)), "other"), (depthwise(12), "other"),
        (nn.Conv2d(16, 16, 5, groups=16, bias=False), "depthwise"),
        (nn.Conv2d(16, 16, 7, groups=16, bias=False), "other"), (nn.Conv2d(16, 32, 3, groups=16), "other"),
        (nn.Conv2d(16, 16, 3, groups=8), "other"), (nn.Conv2d(16, 24, 1), "pointwise"),
        (nn.Conv2d(16, 24, 1, stride=2), "other"), (nn.Conv2d(16, 12, 1), "other"), (nn.Conv2d(3, 8, 1), "other"),
        (nn.Conv2d(16, 8, 1, groups=2), "other"), (nn.Conv2d(16, 8, 1, padding="same"), "other"),
    ],
)  # fmt: skip
def test_kinds_of_convolutions(conv, kind):
    sites = sites_of(nn.Sequential(conv))
    assert [site.kind for site in sites.convs.values()] == [kind]


def test_convolution_with_another_padding_mode_stays_as_it_is():
    assert not sites_of(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, padding_mode="reflect"))).convs


@pytest.mark.parametrize(
    ("conv", "taken"),
    [
        (depthwise(), True), (nn.Conv2d(16, 128, 1, bias=False), True), (nn.Conv2d(16, 136, 1, bias=False), False),
        (nn.Conv2d(16, 8, 1, bias=False, padding=1), False), (nn.Conv2d(16, 8, 3, bias=False), False),
        (nn.Conv2d(16, 8, 1), False), (depthwise(bias=True), False),
    ],
)  # fmt: skip
def test_convolutions_take_over_the_norm_before_them(conv, taken):
    sites = sites_of(nn.BatchNorm2d(16), nn.ReLU6(), conv)
    (site,) = sites.convs.values()
    assert (site.norm is not None) == taken
    assert len(sites.inside) == (2 if taken else 1)


@pytest.mark.parametrize(
    ("pad", "conv", "padding"),
    [
        (nn.ZeroPad2d((0, 1, 2, 3)), depthwise(stride=2), ((3, 1), (4, 2))),
        (nn.ZeroPad2d(1), nn.Conv2d(16, 8, 3, padding=(2, 0)), ((3, 1), (3, 1))),
        (nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(16, 8, 3), None),
        (nn.ZeroPad2d((0, 1, 0, 1)), depthwise(bias=True), None),
        (nn.ZeroPad2d(-1), depthwise(), None), (nn.ConstantPad2d(1, 0.5), depthwise(), None),
        (nn.ZeroPad2d(1), nn.Conv2d(16, 8, 1), None), (nn.ZeroPad2d(1), nn.Conv2d(16, 8, 3, padding="same"), None),
    ],
)  # fmt: skip
def test_convolutions_take_over_the_zero_padding_before_them(pad, conv, padding):
    sites = sites_of(pad, conv)
    (site,) = sites.convs.values()
    assert (site.pad is not None) == (padding is not None) == bool(sites.inside)
    assert padding is None or site.padding == padding


@pytest.mark.parametrize(
    ("pad", "taken"),
    [
        (lambda x: F.pad(x, (1, 0, 1, 0)), True), (lambda x: F.pad(x, [1, 1, 1, 1]), True),
        (lambda x: F.pad(x, (1, 1)), False), (lambda x: F.pad(x, (1, 0, 1, 0), value=1.0), False),
        (lambda x: F.pad(x, (1, 1, 1, 1), "reflect"), False), (lambda x: F.pad(x, (1, 1, -1, 1)), False),
    ],
)  # fmt: skip
def test_depthwise_convolution_takes_over_a_functional_zero_padding(pad, taken):
    (site,) = sites_of(Net(lambda net, x: net.conv(pad(x)), conv=depthwise())).convs.values()
    assert (site.pad is not None) == taken


def test_padding_between_a_norm_and_a_convolution_is_taken_over_with_the_norm():
    sites = sites_of(nn.BatchNorm2d(16), nn.ReLU6(), nn.ZeroPad2d((0, 1, 0, 1)), depthwise(stride=2, padding=0))
    (site,) = sites.convs.values()
    assert site.norm is not None and site.norm.cap == 6.0
    assert len(sites.inside) == 3


@pytest.mark.parametrize(
    ("other", "taken"),
    [
        (lambda x: F.relu(x), True), (lambda x: F.relu(x, inplace=True), False), (lambda x: F.relu(x, True), False),
        (lambda x: torch.relu_(x), False), (lambda x: x.relu_(), False), (nn.ReLU(), True),
        (nn.ReLU(inplace=True), False),
    ],
)  # fmt: skip
def test_padding_of_a_map_that_changes_is_not_taken_over(other, taken):
    """The convolution would read the map after the other operation."""
    parts = dict(conv=depthwise(), other=other) if isinstance(other, nn.Module) else dict(conv=depthwise())

    def run(net, x):
        padded = F.pad(x, (1, 1, 1, 1))
        changed = net.other(x) if isinstance(other, nn.Module) else other(x)
        return net.conv(padded) + F.pad(changed, (1, 1, 1, 1))

    (site,) = sites_of(Net(run, **parts)).convs.values()
    assert (site.pad is not None) == taken


def test_padding_of_a_map_that_is_added_to_in_place_is_not_taken_over():
    graph = fx.symbolic_trace(
        Net(lambda net, x: net.conv(F.pad(x, (1, 1, 1, 1))).sum() + (x + 1).sum(), conv=depthwise())
    )
    assert find_sites(graph, training=True).inside
    for node in graph.graph.nodes:
        if node.target is operator.add and 1 in node.args:
            node.target = operator.iadd
    assert not find_sites(graph, training=True).inside


def test_padding_that_is_read_twice_is_not_taken_over():
    run = lambda net, x: (lambda y: net.conv(y) + y)(F.pad(x, (1, 1, 1, 1)))  # noqa: E731
    (site,) = sites_of(Net(run, conv=depthwise())).convs.values()
    assert site.pad is None


@pytest.mark.parametrize("layers", [(nn.ReLU(), nn.MaxPool2d(2)), (nn.SiLU(),)])
def test_convolution_after_something_else_takes_over_nothing(layers):
    (site,) = sites_of(nn.BatchNorm2d(16), *layers, depthwise()).convs.values()
    assert site.norm is None


def test_norm_with_a_residual_or_two_readers_is_not_taken_over():
    parts = dict(norm=nn.BatchNorm2d(16), conv=depthwise())
    for run in (lambda net, x: net.conv(net.norm(x) + x), lambda net, x: (lambda y: net.conv(y) + y)(net.norm(x))):
        (site,) = sites_of(Net(run, **parts)).convs.values()
        assert site.norm is None


def test_bias_before_a_norm_is_left_out():
    (site,) = sites_of(depthwise(bias=True), nn.BatchNorm2d(16)).convs.values()
    assert (site.kind, site.adds_bias) == ("depthwise", False)
    (site,) = sites_of(
        Net(lambda net, x: (lambda y: net.b(y) + y)(net.a(x)), a=depthwise(bias=True), b=nn.BatchNorm2d(16))
    ).convs.values()
    assert (site.kind, site.adds_bias) == ("other", True)


@pytest.mark.parametrize(
    "register", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]
)
def test_modules_with_hooks_stay_as_they_are(register):
    model = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU())
    assert len(sites_of(model).norms) == 1
    graph = fx.symbolic_trace(model)
    for module in graph.children():
        getattr(module, register)(lambda *_: None)
    sites = find_sites(graph, training=True)
    assert not sites and not sites.convs


def test_module_with_a_forward_of_its_own_stays_as_it_is():
    norm = nn.BatchNorm2d(8)
    norm.forward = lambda x: x
    assert not sites_of(nn.Sequential(norm))


def test_weights_are_those_that_are_used():
    conv, last, linear = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(4, 4, bias=False)
    weights = sites_of(conv, nn.BatchNorm2d(8), last, linear).weights()
    assert {id(tensor) for tensor in weights.values()} == {
        id(t) for t in (conv.weight, last.weight, last.bias, linear.weight)
    }


def test_nothing_is_fused_on_the_cpu():
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    assert fuse(model) is None
    assert fuse_eval(model.eval()) is None


@pytest.mark.parametrize("hidden", ["", "sys.modules['triton'] = None; "])
def test_package_loads_without_triton(hidden):
    code = f"import sys; {hidden}import depthfold.kernels; print(sys.modules.get('triton'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "None", done.stderr
