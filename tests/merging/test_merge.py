"""merge(): the shallow network computes what the student computes, and it is a plain module."""

import copy
import io
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
from depthfold.errors import InvalidValue
from depthfold.testing import random_plan, randomise_statistics
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


@pytest.mark.parametrize("name", REAL)
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
def test_half_precisions_are_composed_in_double_and_returned_as_they_were(dtype):
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


def small():
    """A stem and a pool; then a residual with a projection, dropout and a depth-wise layer."""
    return nn.Sequential(
        nn.Sequential(conv(4, 6, stride=2, bias=False), nn.BatchNorm2d(6, eps=0.1), nn.ReLU()),
        nn.MaxPool2d(3, 1, 1),
        Residual(6, 8, stride=1),
        nn.Dropout(0.2),
        conv(8, 8, groups=8),
        nn.BatchNorm2d(8, eps=0.01),
        nn.ReLU6(),
        conv(8, 4, kernel=1),
    )


class Residual(nn.Module):
    def __init__(self, ins, outs, stride):
        super().__init__()
        self.a, self.n1 = conv(ins, outs, stride=stride, bias=False), nn.BatchNorm2d(outs)
        self.b, self.n2 = conv(outs, outs, bias=False), nn.BatchNorm2d(outs)
        self.down = nn.Sequential(nn.Conv2d(ins, outs, 1, stride=stride, bias=False), nn.BatchNorm2d(outs, eps=0.3))
        self.act = nn.ReLU6()

    def forward(self, x):
        return self.act(self.n2(self.b(self.act(self.n1(self.a(x))))) + self.down(x))


def folded(model=None, x=None, plan=None, dtype=torch.float64):
    """Student and shallow network, and an input."""
    model = randomise_statistics(small() if model is None else model).to(dtype).eval()
    x = (image() if x is None else x).to(dtype)
    traced = df.trace(model, x)
    student = df.rewrite(traced, plan or df.Plan((), ()))
    return student, df.merge(student), x


def test_every_segment_is_one_convolution_and_batch_norms_outside_are_folded_too():
    student, shallow, x = folded()
    convs = [part for part in shallow.modules() if isinstance(part, nn.Conv2d)]
    assert len(convs) == 2  # the stem, and everything after the pool
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
def test_only_layers_of_pytorch_are_left(model):
    randomise_statistics(model).double().eval()
    traced = df.trace(model, image().double())
    for plan in (traced.vanilla, df.Plan((), ())):
        shallow = df.merge(df.rewrite(traced, plan))
        foreign = {type(part).__name__ for part in shallow.modules() if not type(part).__module__.startswith("torch.")}
        assert foreign <= {type(shallow).__name__}
        assert not any(isinstance(part, DropPath) for part in shallow.modules())


def test_depthwise_and_grouped_structure_is_kept_where_it_survives():
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


def test_a_depthwise_residual_stays_depthwise():
    model = Net(lambda net, x: net.b(F.relu(net.a(x))) + x, a=conv(groups=4), b=conv(groups=4))
    student, shallow, x = folded(model)
    (merged,) = [part for part in shallow.modules() if isinstance(part, nn.Conv2d)]
    assert (merged.groups, merged.kernel_size) == (4, (5, 5))
    with torch.no_grad():
        agree(shallow(x), student(x))


def test_padding_that_is_not_symmetric_merges():
    model = nn.Sequential(
        nn.ZeroPad2d((0, 1, 2, 0)), nn.Conv2d(4, 4, 2), nn.ReLU(), nn.Conv2d(4, 4, (2, 4), padding="same")
    )
    student, shallow, x = folded(model)
    with torch.no_grad():
        agree(shallow(x), student(x))
    assert sum(isinstance(part, nn.Conv2d) for part in shallow.modules()) == 1


def test_the_shallow_network_deep_copies():
    student, shallow, x = folded()
    twin = copy.deepcopy(shallow)
    with torch.no_grad():
        next(shallow.parameters()).zero_()
        agree(twin(x), student(x))
    assert df.verify(student, twin).ok


def test_the_state_dict_saves_and_loads():
    student, shallow, x = folded()
    buffer = io.BytesIO()
    torch.save(shallow.state_dict(), buffer)
    buffer.seek(0)
    again = copy.deepcopy(shallow)
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    again.load_state_dict(torch.load(buffer, weights_only=True))
    with torch.no_grad():
        assert torch.equal(again(x), shallow(x))
    assert set(shallow.state_dict()) <= {*student.state_dict(), *(f"{n}.bias" for n, _ in shallow.named_modules())}


def test_torch_export_runs_the_shallow_network():
    _, shallow, x = folded(dtype=torch.float32)
    program = torch.export.export(shallow, (x,))
    with torch.no_grad():
        agree(program.module()(x), shallow(x), 1e-5)


def test_onnx_runs_the_shallow_network(tmp_path):
    import onnxruntime

    student, shallow, x = folded(dtype=torch.float32)
    path = tmp_path / "shallow.onnx"
    torch.onnx.export(shallow, (x,), path, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        agree(torch.from_numpy(found), student(x), 1e-4)


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = small()
        self.head = nn.Sequential(conv(), nn.BatchNorm2d(4))

    def forward(self, x):
        x = self.head(self.body(x))
        return x[x > 0] if x.max() > 100 else x


def test_at_returns_the_whole_model():
    model = randomise_statistics(Detector()).double().eval()
    x = image().double()
    student = df.rewrite(df.trace(model, x, at="body"), df.Plan((), ()))
    shallow = df.merge(student)
    assert type(shallow) is Detector
    with torch.no_grad():
        agree(shallow(x), student(x))
    assert sum(isinstance(part, nn.Conv2d) for part in shallow.body.modules()) == 2
    assert df.verify(student, shallow, x).ok


def test_a_student_inside_another_module_merges_in_place_of_itself():
    student, _, x = folded()
    shallow = df.merge(nn.Sequential(student, nn.ReLU()))
    with torch.no_grad():
        agree(shallow(x), F.relu(student(x)))


def test_merging_leaves_the_student_as_it_is_and_returns_evaluation_mode():
    student, _, x = folded()
    student.train()
    student.get_submodule("5").eval()
    modes = {name: part.training for name, part in student.named_modules()}
    state = {name: value.clone() for name, value in student.state_dict().items()}
    shallow = df.merge(student)
    assert not any(part.training for part in shallow.modules())
    assert {name: part.training for name, part in student.named_modules()} == modes
    assert all(torch.equal(value, state[name]) for name, value in student.state_dict().items())
    with torch.no_grad():
        agree(shallow(x), student.eval()(x))


def test_the_shallow_network_shares_no_memory_with_the_student():
    """Kernels are composed in float64, and these weights are: a segment of one layer could pass them on as they are."""
    model = Net(lambda net, x: net.b(F.relu(net.a(x) + x)), a=conv(), b=conv(kernel=1))
    student, shallow, _ = folded(model, plan=df.Plan((1,), (1,)))
    both = [{p.untyped_storage().data_ptr() for p in traced.parameters()} for traced in (student, shallow)]
    assert [len(each) for each in both] == [4, 4]
    assert not set.intersection(*both)
    state = {name: value.clone() for name, value in student.state_dict().items()}
    df.merge(student)
    assert all(torch.equal(value, state[name]) for name, value in student.state_dict().items())


def test_weights_that_were_trained_after_rewriting_are_the_ones_that_merge():
    student, before, x = folded()
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(torch.randn(parameter.shape, dtype=parameter.dtype) * 0.1)
        shallow = df.merge(student)
        agree(shallow(x), student(x))
        assert (before(x) - student(x)).abs().max() > 1e-3


def test_what_is_no_student_is_refused():
    for thing in (conv(), folded()[1], None, "student"):
        with pytest.raises(df.DepthfoldError, match=r"is no rewritten network: expected what rewrite\(traced, plan\)"):
            df.merge(thing)


def test_a_student_that_was_pickled_as_a_whole_is_refused_and_the_way_out_works():
    model, x = randomise_statistics(small()).double().eval(), image().double()
    traced = df.trace(model, x)
    student = df.rewrite(traced, df.Plan((), ()))
    with torch.no_grad():
        for parameter in student.parameters():  # it was trained
            parameter.add_(0.01)
    file = io.BytesIO()
    torch.save(student, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for part in (loaded, nn.Sequential(loaded)):
        with pytest.raises(InvalidValue) as error:
            df.merge(part)
        assert str(error.value).endswith(
            "torch.save() of the whole module keeps its weights, but not its plan: rewrite the network once more and "
            "load them, with student = rewrite(traced, plan) and student.load_state_dict(loaded.state_dict())."
        )
    again = df.rewrite(traced, df.Plan((), ()))
    again.load_state_dict(loaded.state_dict())
    with torch.no_grad():
        agree(df.merge(again)(x), student(x))


@pytest.mark.parametrize("other", [conv(), nn.Sequential(conv())])
def test_what_was_never_rewritten_is_not_told_about_pickling(other):
    with pytest.raises(InvalidValue) as error:
        df.merge(other)
    assert "torch.save" not in str(error.value)


def test_several_outputs_in_a_dict_merge():
    model = Net(
        lambda net, x: (lambda y: {"low": y, "high": [net.b(F.relu(net.c(y))), y.shape[0]]})(net.a(x)),
        a=conv(),
        b=conv(),
        c=conv(),
    ).double()
    x = image().double()
    student = df.rewrite(df.trace(model, x), df.Plan((), ()))
    found, wanted = df.merge(student)(x), student(x)
    agree(found["low"], wanted["low"])
    agree(found["high"][0], wanted["high"][0])
    assert found["high"][1] == 2


def test_a_copy_that_makes_a_map_contiguous_stays_where_a_view_needs_it():
    model = Net(lambda net, x: net.b(F.relu(net.a(x))).permute(0, 2, 3, 1).contiguous().view(2, -1), a=conv(), b=conv())
    student, shallow, x = folded(model)
    with torch.no_grad():
        agree(shallow(x), student(x))


def convolution_calls(shallow):
    """How many convolutions run: a convolution that is left over and still called costs time, and no count of modules
    shows it."""
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
def test_segments_that_end_in_a_norm_with_an_activation_inside(inplace):
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


def test_stray_norms_and_activations_of_timm_keep_their_values():
    torch.manual_seed(0)
    model = nn.Sequential(
        BatchNormAct2d(4, eps=0.3, act_layer=nn.ReLU), GELUTanh(), nn.AvgPool2d(2), nn.Conv2d(4, 4, 1)
    )
    randomise_statistics(model).double().eval()
    traced = df.trace(model, image().double())
    shallow = df.merge(df.rewrite(traced, traced.vanilla))
    agree(shallow(image().double()), model(image().double()))


def test_a_stem_under_two_norms_is_not_folded_into_one_of_them():
    torch.manual_seed(0)
    stem, one, two = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4, eps=0.5)
    model = Net(
        lambda net, x: net.last(torch.cat([net.one(net.stem(x)), net.two(net.stem(x))], 1)),
        stem=stem, one=one, two=two, last=nn.Conv2d(8, 4, 1),
    )  # fmt: skip
    randomise_statistics(model).double().eval()
    traced = df.trace(model, image().double())
    agree(df.merge(df.rewrite(traced, traced.vanilla))(image().double()), model(image().double()))


def test_a_stem_whose_value_others_read_keeps_it():
    torch.manual_seed(0)
    model = Net(
        lambda net, x: (lambda y: torch.cat([net.norm(y), y.abs()], 1))(net.stem(x)),
        stem=nn.Conv2d(4, 4, 1), norm=nn.BatchNorm2d(4),
    )  # fmt: skip
    randomise_statistics(model).double().eval()
    traced = df.trace(model, image().double(), ignore=["stem", "norm"])
    agree(df.merge(df.rewrite(traced, df.Plan((), ())))(image().double()), model(image().double()))
