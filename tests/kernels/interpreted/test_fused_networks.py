"""fuse() and fuse_eval() on whole networks."""

import copy
import gc
import operator
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import depthfold as df
from depthfold.demo.network import InvertedResidual
from depthfold.kernels import fuse, fuse_eval, tiles
from depthfold.kernels.convolution import convolve
from depthfold.kernels.norm import norm_act
from depthfold.testing import randomise_statistics
from depthfold.tracing import free_weights
from depthfold.tracing.functional import use_plain_convolutions
from depthfold.training.forwards import FusedForwards
from kernel_cases import close
from nets import Net


@pytest.fixture(autouse=True)
def few_programs(small_tiles, monkeypatch):
    """Use larger tiles again, because a whole network is slow in the interpreter."""
    tile = tiles.DepthwiseTile(strip=4, strips=2, elements=64, warps=1, launched=1)
    monkeypatch.setattr(tiles, "DEPTHWISE_FORWARD", (tile, tile))
    monkeypatch.setattr(tiles, "DEPTHWISE_BACKWARD", (tile, tile))
    monkeypatch.setattr(tiles, "NORM", (tiles.NormTile(1024, 1, 64),) * 2)


def small_mobilenet():
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU6(inplace=True)),
        InvertedResidual(8, 8, 1, 2, 0.0),
        InvertedResidual(8, 16, 2, 2, 0.0),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    )


def small_vgg():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2, 2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2, 2),
        nn.Flatten(), nn.Linear(64, 5),
    )  # fmt: skip


def student_of(model, x, *, inside):
    """Return the student that merges the layers around some positions and has an activation after every addition."""
    traced = df.trace(model, x)
    cuts = [p for p in range(1, traced.depth) if p not in inside]
    return df.rewrite(traced, df.Plan(cuts, cuts))


def step(model, reference, module, x):
    """Compare one forward and backward of a module with a reference in float64, by the parameters of its model."""
    output, wanted = module(x), reference(x.double())
    close(output, wanted)
    gradient = torch.randn(wanted.shape)
    output.backward(gradient)
    wanted.backward(gradient.double())
    for (name, found), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert found.grad.dtype == torch.float32, name
        close(found.grad, other.grad)
    for found, other in zip(model.buffers(), reference.buffers(), strict=True):
        close(found, other)


@pytest.mark.parametrize("inside", [(2, 3), (5, 6)])
def test_fused_student_equals_the_student(inside):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    student = student_of(randomise_statistics(small_mobilenet()), x, inside=inside).train()
    reference = copy.deepcopy(student).double()
    fused = fuse(student)
    calls = {node.target.__name__ for node in fused.module.graph.nodes if node.op == "call_function"}
    assert {"convolve", "norm_act", "pointwise"} <= calls
    for node in fused.module.graph.nodes:
        if node.op == "call_function" and node.target in (convolve, norm_act):
            source, sums = node.args[:2]
            assert (sums is not None) == (source.target is operator.getitem)  # a convolution has computed them
    step(student, reference, fused, x)


class PaddedConv(nn.Conv2d):
    """A convolution as in networks from TensorFlow: it pads its input itself, on two sides, or on none."""

    def __init__(self, *given, pad=None, **more):
        super().__init__(*given, bias=False, **more)
        self.pad = Nothing() if pad is None else nn.ZeroPad2d(pad)

    def forward(self, x):
        return F.conv2d(self.pad(x), self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Nothing(nn.Module):
    def forward(self, input):
        return input


def padded_network():
    return nn.Sequential(
        PaddedConv(3, 8, 3, pad=1), nn.BatchNorm2d(8), nn.ReLU6(),
        PaddedConv(8, 8, 5, stride=2, groups=8, pad=(1, 2, 1, 2)), nn.BatchNorm2d(8), nn.ReLU6(),
        PaddedConv(8, 16, 1), nn.BatchNorm2d(16), nn.Flatten(), nn.Linear(256, 5),
    )  # fmt: skip


@pytest.mark.parametrize(("inside", "pads"), [((), 0), ((1,), 1), ((2,), 0)])
def test_student_with_functional_convolutions_and_separate_padding_is_fused(inside, pads):
    """In a forward of the training, which knows functional convolutions.

    Merging the first two layers pads the first one, which is dense, by different widths, so that this stays an F.pad.
    """
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    student = student_of(randomise_statistics(padded_network()), x, inside=inside).train()
    reference = copy.deepcopy(student).double()
    forwards = FusedForwards((student,), df.Recipe(epochs=1, lr=0.1, precision="bfloat16", channels_last=True))
    with forwards:
        graph = student.forward.__self__.module.graph
        assert [node.target for node in graph.nodes].count(convolve) == 2
        assert [node.target for node in graph.nodes].count(F.pad) == pads
        assert [str(node.target) for node in graph.nodes if node.op == "call_module"] == ["8"]  # the flatten
        step(student, reference, student, x)


def test_network_with_separate_padding_is_fused_in_evaluation_mode():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    student = student_of(randomise_statistics(padded_network()), x, inside=(2,)).eval()
    fused = fuse_eval(student, torch.float32, prepare=use_plain_convolutions)
    assert [node.target for node in fused.module.graph.nodes].count(convolve) == 2
    close(fused(x), copy.deepcopy(student).double()(x.double()))


def test_close_frees_the_tensors_of_functional_convolutions():
    """The student itself refers to itself, but its weights can be removed from it."""
    student = student_of(padded_network(), torch.randn(2, 3, 8, 8), inside=()).train()
    weights = [weakref.ref(weight) for weight in student.parameters()]
    gc.collect()
    gc.disable()
    try:
        recipe = df.Recipe(epochs=1, lr=0.1, precision="bfloat16", channels_last=True)
        FusedForwards((student,), recipe).close()
        free_weights(student)
        assert weights and not any(weight() is not None for weight in weights)
    finally:
        gc.enable()


class Several(nn.Module):
    def forward(self, *inputs):
        return inputs


def test_module_that_returns_all_its_inputs_is_not_an_identity():
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_module("several", (graph.call_module("norm", (x,)),))
    graph.output(graph.call_function(operator.getitem, (y, 0)))
    model = fx.GraphModule(dict(several=Several(), norm=nn.BatchNorm2d(8)), graph).train()
    inputs = torch.randn(2, 8, 2, 2)
    assert fuse(model)(inputs).shape == inputs.shape


def test_identity_with_a_hook_is_still_called():
    model, calls = nn.Sequential(nn.BatchNorm2d(8), nn.Identity(), nn.Identity()).train(), []
    model[1].register_forward_hook(lambda *_: calls.append(1))
    fused = fuse(model)
    assert [node.target for node in fused.module.graph.nodes if node.op == "call_module"] == ["1"]
    fused(torch.randn(2, 8, 2, 2))
    assert calls


def test_two_fused_steps_of_a_plain_network_equal_its_own():
    torch.manual_seed(0)
    model = randomise_statistics(small_vgg()).train()
    reference = copy.deepcopy(model).double()
    fused = fuse(model)
    assert [node.target.__name__ for node in fused.module.graph.nodes if "pool" in node.name] == ["norm_act_pool"] * 2
    optimizers = [torch.optim.SGD(each.parameters(), 0.05, weight_decay=0.1) for each in (model, reference)]
    for _ in range(2):
        step(model, reference, fused, torch.randn(3, 3, 8, 8))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        close(found, wanted)
    assert model[1].num_batches_tracked == 2


def test_fused_module_has_the_parameters_and_buffers_of_the_model():
    model = small_vgg()
    fused = fuse(model)
    assert {id(p) for p in fused.parameters()} == {id(p) for p in model.parameters()}
    assert {id(b) for b in fused.buffers()} == {id(b) for b in model.buffers()}


@pytest.mark.parametrize("make", [fuse, lambda model: fuse_eval(model.eval(), torch.float32)])
def test_model_is_not_changed(make):
    x = torch.randn(2, 3, 8, 8)
    student = student_of(small_mobilenet(), x, inside=(2, 3)).train()
    make(student)  # in the mode in which it is then compared
    modules, code = dict(student.named_modules()), student.code
    tensors = {
        name: (tensor, tensor.clone(), tensor.stride()) for name, tensor in student.state_dict(keep_vars=True).items()
    }
    make(student)
    assert dict(student.named_modules()) == modules
    assert student.code == code
    after = student.state_dict(keep_vars=True)
    assert after.keys() == tensors.keys()
    for name, (tensor, value, strides) in tensors.items():
        assert after[name] is tensor and after[name].stride() == strides and torch.equal(after[name], value)


def test_parameter_without_gradient_gets_none():
    model = small_vgg().train()
    model[0].weight.requires_grad_(False)
    fuse(model)(torch.randn(2, 3, 8, 8)).sum().backward()
    assert model[0].weight.grad is None
    assert model[4].weight.grad is not None


def test_operations_without_a_kernel_are_still_computed():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(),
        nn.Conv2d(8, 16, 3, groups=4), nn.BatchNorm2d(16).eval(), nn.ReLU(),
        nn.Conv2d(16, 16, 1, stride=2, bias=False), nn.GroupNorm(2, 16), nn.ReLU(inplace=True),
    )  # fmt: skip
    step(model, copy.deepcopy(model).double(), fuse(model), torch.randn(2, 3, 7, 7))


def test_fused_network_in_evaluation_mode_equals_the_network():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    student = student_of(randomise_statistics(small_mobilenet()), x, inside=(2, 3)).eval()
    fused = fuse_eval(student, torch.float32)
    close(fused(x), copy.deepcopy(student).double()(x.double()))


def test_fused_network_in_evaluation_mode_records_no_gradients():
    model = Net(lambda net, x: net.norm(x) * x, norm=nn.BatchNorm2d(8)).eval()
    assert not fuse_eval(model, torch.float32)(torch.randn(1, 8, 2, 2, requires_grad=True)).requires_grad


def test_refresh_reads_new_weights_and_statistics():
    torch.manual_seed(0)
    x, model = torch.randn(2, 3, 8, 8), randomise_statistics(small_vgg()).eval()
    fused = fuse_eval(model, torch.float32)
    before = fused(x)
    other = randomise_statistics(small_vgg(), seed=1)
    model.load_state_dict(other.state_dict())
    assert torch.equal(fused(x), before)
    fused.refresh()
    close(fused(x), other.double().eval()(x.double()))


def test_input_is_cast_by_autocast():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).train()
    with torch.autocast("cpu", torch.bfloat16):
        assert fuse(model)(torch.randn(2, 3, 8, 8)).dtype == torch.bfloat16
    assert fuse(model)(torch.randn(2, 3, 8, 8)).dtype == torch.float32


class Untraceable(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = small_vgg()

    def forward(self, x):
        return self.inner(x) if x.sum() > 0 else self.inner(-x)


class Functional(nn.Module):
    """A network whose layers are functions, which have no modules that could be replaced."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 3, 3, 3))

    def forward(self, x):
        return F.relu(F.conv2d(x, self.weight))


def test_depthwise_convolution_without_any_norm_is_fused():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8, bias=False), nn.Flatten())
    step(model, copy.deepcopy(model).double(), fuse(model), torch.randn(2, 8, 3, 3))


@pytest.mark.parametrize("model", [Untraceable(), Functional(), small_vgg().eval(), nn.ReLU()])
def test_network_that_cannot_be_fused_gives_none(model):
    assert fuse(model) is None


def test_training_network_has_no_fused_evaluation():
    assert fuse_eval(small_vgg().train()) is None


def test_model_with_a_hook_gives_none():
    model = small_vgg().train()
    model.register_forward_hook(lambda *_: None)
    assert fuse(model) is None


def test_without_triton_nothing_is_fused(monkeypatch):
    assert fuse(small_vgg().train()) is not None
    monkeypatch.setitem(sys.modules, "triton", None)
    assert fuse(small_vgg().train()) is None
    assert fuse_eval(small_vgg().eval()) is None


@pytest.mark.parametrize("make", [fuse, fuse_eval])
def test_close_frees_the_tensors(make):
    """Without the garbage collector, which may run much later: a graph refers to itself."""
    model = small_vgg().train(make is fuse)
    x = torch.randn(2, 3, 8, 8)
    fused = make(model, torch.float32) if make is fuse_eval else make(model)
    wanted, tensors = model(x), [weakref.ref(each) for each in (*fused.parameters(), *fused.buffers())]
    gc.collect()
    gc.disable()
    try:
        fused(x)
        fused.close()
        torch.testing.assert_close(model.eval()(x), model(x))  # the model itself is not changed
        del model, wanted, fused
        assert tensors
        assert not any(each() is not None for each in tensors)
    finally:
        gc.enable()


def test_nan_stays_nan():
    """As in PyTorch, so that the loss shows when a training run diverges."""
    model = small_mobilenet().eval()
    fused, x = fuse_eval(model, torch.float32), torch.randn(2, 3, 8, 8)
    x[1, 0, 2, 2] = torch.nan
    found, wanted = fused(x), model(x)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert found[1].isnan().any()
    torch.testing.assert_close(found[0], wanted[0])
