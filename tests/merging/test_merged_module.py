"""The result of merge() as a module: copies, state dict, export, and its relation to the student."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

import depthfold as df
from depthfold.errors import InvalidValue
from depthfold.testing import randomise_statistics
from merged import folded, small
from nets import Net, agree, conv, image


def test_shallow_network_can_be_deep_copied():
    student, shallow, x = folded()
    twin = copy.deepcopy(shallow)
    with torch.no_grad():
        next(shallow.parameters()).zero_()
        agree(twin(x), student(x))
    assert df.verify(student, twin).ok


def test_state_dict_can_be_saved_and_loaded():
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


def test_shallow_network_runs_in_torch_export():
    _, shallow, x = folded(dtype=torch.float32)
    program = torch.export.export(shallow, (x,))
    with torch.no_grad():
        agree(program.module()(x), shallow(x), 1e-5)


def test_shallow_network_runs_in_onnxruntime(tmp_path):
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


def test_student_inside_another_module_is_merged():
    student, _, x = folded()
    shallow = df.merge(nn.Sequential(student, nn.ReLU()))
    with torch.no_grad():
        agree(shallow(x), F.relu(student(x)))


def test_merge_does_not_change_the_student_and_returns_evaluation_mode():
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


def test_shallow_network_shares_no_memory_with_the_student():
    """The weights are already in float64, so that a segment of one layer could reuse them."""
    model = Net(lambda net, x: net.b(F.relu(net.a(x) + x)), a=conv(), b=conv(kernel=1))
    student, shallow, _ = folded(model, plan=df.Plan((1,), (1,)))
    both = [{p.untyped_storage().data_ptr() for p in traced.parameters()} for traced in (student, shallow)]
    assert [len(each) for each in both] == [4, 4]
    assert not set.intersection(*both)
    state = {name: value.clone() for name, value in student.state_dict().items()}
    df.merge(student)
    assert all(torch.equal(value, state[name]) for name, value in student.state_dict().items())


def test_merge_uses_the_trained_weights():
    student, before, x = folded()
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(torch.randn(parameter.shape, dtype=parameter.dtype) * 0.1)
        shallow = df.merge(student)
        agree(shallow(x), student(x))
        assert (before(x) - student(x)).abs().max() > 1e-3


def test_other_modules_are_refused():
    for thing in (conv(), folded()[1], None, "student"):
        with pytest.raises(df.DepthfoldError, match=r"is not a rewritten network.* Pass the result of rewrite\("):
            df.merge(thing)


def test_pruned_student_is_refused():
    student = df.rewrite(traced := df.trace(nn.Sequential(conv(), nn.ReLU(), conv()), image()), traced.vanilla)
    pruned = student.get_submodule("0")
    prune.l1_unstructured(pruned, "weight", 0.5)
    student(image())
    with pytest.raises(InvalidValue, match=r"weights of 0, .*prune\.remove\(module, 'weight'\)"):
        df.merge(student)
    prune.remove(pruned, "weight")
    agree(df.merge(student)(image()), student.eval()(image()), 1e-5)


@pytest.mark.parametrize("compute", [nn.utils.weight_norm, lambda part: prune.l1_unstructured(part, "weight", 0.5)])
def test_computed_weights_outside_all_segments_stay(compute):
    model = nn.Sequential(conv(), conv(), nn.ReLU(), conv(), nn.ReLU(), conv())
    compute(model[3])
    traced = df.trace(model, image())
    student = df.rewrite(traced, traced.vanilla)
    student(image()).sum().backward()  # leaves a weight with a gradient history
    agree(df.merge(student)(image()), student.eval()(image()), 1e-5)


def test_compiled_student_is_refused_and_what_was_compiled_is_merged():
    student, _, x = folded()
    compiled = torch.compile(student, backend="eager")
    for thing in (compiled, nn.Sequential(compiled)):
        with pytest.raises(df.DepthfoldError, match=r"wrapped by torch.compile\(\).*compiled._orig_mod"):
            df.merge(thing)
    agree(df.merge(compiled._orig_mod)(x), student(x))
    student.compile(backend="eager")  # in place: nothing is wrapped
    agree(df.merge(student)(x), student(x))


def test_pickled_student_is_refused_and_its_weights_can_be_loaded():
    model, x = randomise_statistics(small()).double().eval(), image().double()
    traced = df.trace(model, x)
    student = df.rewrite(traced, df.Plan((), ()))
    with torch.no_grad():
        for parameter in student.parameters():  # stands for training
            parameter.add_(0.01)
    file = io.BytesIO()
    torch.save(student, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for part in (loaded, nn.Sequential(loaded)):
        with pytest.raises(InvalidValue) as error:
            df.merge(part)
        assert str(error.value).endswith(
            "torch.save() of a whole module does not save it. Create the student again with rewrite(traced, plan), and "
            "load the weights with student.load_state_dict(loaded.state_dict())."
        )
    again = df.rewrite(traced, df.Plan((), ()))
    again.load_state_dict(loaded.state_dict())
    with torch.no_grad():
        agree(df.merge(again)(x), student(x))


@pytest.mark.parametrize("other", [conv(), nn.Sequential(conv())])
def test_message_for_other_modules_does_not_mention_pickling(other):
    with pytest.raises(InvalidValue) as error:
        df.merge(other)
    assert "torch.save" not in str(error.value)


def test_outputs_in_a_dict_are_merged():
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
