"""What every verb does with a network on a device. This file takes `device`: it is run on each that the machine has.

The results are on the device of what was given, the user's model stays there as it was, and the numbers are the CPU's.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnxruntime
import pytest
import torch
from accelerate.state import AcceleratorState
from torch import nn

import depthfold as df
from depthfold.backends.cuda import cuda_settings
from depthfold.errors import TraceError
from depthfold.importance.entry import EntryWorker
from depthfold.jobs import InProcess, Processes
from depthfold.training import device as training_device
from lacking import devices
from latency_workshop import QUICK
from small_training import equal
from tiny_importance import RECIPE, SIZE, Tiny, TinyTask, images

# Without a GPU, they compare the CPU with itself.
pytestmark = pytest.mark.slow

PLAN = df.Plan((1, 4), (1, 4))  # layers 2 to 4 are one: a residual and a stride
CLOSE = dict(rtol=1e-4, atol=1e-4)


@pytest.fixture(autouse=True)
def in_float32():
    """As on a CPU: convolutions on a GPU round to TF32 unless they are told otherwise."""
    with cuda_settings(tf32=False, benchmark=False):
        yield


@pytest.fixture
def free_choice(monkeypatch):
    """As outside the tests: nobody has told accelerate where to train."""

    def forget():
        AcceleratorState._reset_state(reset_partial_state=True)
        training_device._read_new_state.cache_clear()

    monkeypatch.delenv("ACCELERATE_USE_CPU")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")  # nor do worker processes use TF32
    forget()
    yield devices()[-1]
    forget()


@dataclass(frozen=True, kw_only=True)
class TaskOn(TinyTask):
    """The tiny task, which must be asked on this device."""

    device: str

    def loss(self, model, step):
        assert step.device.type == kind(model) == self.device
        return super().loss(model, step)

    def score(self, model, split):
        assert kind(model) == self.device
        return super().score(model, split)


def kind(module):
    """The device of all tensors of a module."""
    (found,) = {tensor.device.type for tensor in (*module.parameters(), *module.buffers())}
    return found


def net(device):
    return Tiny().eval().to(device)


def picture(device="cpu"):
    return images(3, seed=1)[0].to(device)


def student_on(device):
    return df.rewrite(df.trace(net(device), picture(device)), PLAN)


def merged_on(device):
    return df.merge(student_on(device))


def outputs(module, device):
    with torch.no_grad():
        return module(picture(device)).cpu()


def test_networks_are_where_the_model_is(device):
    model = net(device)
    traced = df.trace(model, picture(device))
    student = df.rewrite(traced, PLAN)
    shallow = df.merge(student)
    assert {kind(part) for part in (traced.graph, student, shallow, model)} == {device}
    assert equal(model, net(device)) and not model.training
    torch.testing.assert_close(outputs(shallow, device), outputs(merged_on("cpu"), "cpu"), **CLOSE)


def test_a_submodule_is_too(device):
    whole = nn.Sequential(nn.Identity(), net(device))
    student = df.rewrite(df.trace(whole, picture(device), at="1"), PLAN)
    shallow = df.merge(student)
    assert kind(student) == kind(shallow) == kind(whole) == device
    torch.testing.assert_close(outputs(shallow, device), outputs(merged_on("cpu"), "cpu"), **CLOSE)


def test_example_inputs_must_be_where_the_model_is(device):
    elsewhere = {"cpu": "meta", "cuda": "cpu"}[device]
    with pytest.raises(TraceError, match="Pass inputs on its device and in its precision"):
        df.trace(net(device), picture().to(elsewhere))


def test_the_comparison_is_on_the_device_whatever_it_computes_in_otherwise(device):
    student = student_on(device)
    shallow = df.merge(student)
    with cuda_settings(tf32=True, benchmark=True):  # as a user may have it
        for inputs in (None, picture(device), picture("cpu")):
            assert df.verify(student, shallow, inputs).ok
    assert kind(student) == kind(shallow) == device


@pytest.mark.parametrize("at", devices())
def test_fine_tuning_is_where_it_is_told_and_gives_a_student_where_it_was(at, device):
    student, teacher = student_on(device), net(device)
    trained = df.finetune(student, TaskOn(device=at), RECIPE, teacher=teacher, device=at)
    expected = df.finetune(student_on("cpu"), TinyTask(), RECIPE, device="cpu")
    assert kind(trained) == kind(student) == kind(teacher) == device
    assert equal(student, student_on(device)) and equal(teacher, net(device))
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(trained.state_dict()[name].cpu(), tensor, rtol=1e-3, atol=1e-3)
    assert kind(df.merge(trained)) == device


def test_without_a_device_the_best_of_the_machine_trains(free_choice):
    student = student_on("cpu")
    trained = df.finetune(student, TaskOn(device=free_choice), RECIPE)
    assert kind(trained) == kind(student) == "cpu"


def test_the_users_random_numbers_are_untouched(device):
    student = student_on("cpu")
    torch.manual_seed(3)
    expected = torch.rand(4), torch.rand(4, device=device)
    torch.manual_seed(3)
    df.finetune(student, TinyTask(), RECIPE, device=device)
    assert torch.equal(torch.rand(4), expected[0])
    assert torch.equal(torch.rand(4, device=device), expected[1])


def test_a_fine_tuning_goes_on_on_another_device(device, tmp_path):
    first = df.finetune(student_on(device), TinyTask(), RECIPE, device=device, run=tmp_path)
    again = df.finetune(student_on("cpu"), TaskOn(device="not asked any more"), RECIPE, device="cpu", run=tmp_path)
    assert kind(again) == "cpu" and equal(first.cpu(), again)


@pytest.fixture(scope="module")
def trained_on_the_cpu():
    """Return the importances that are trained on the CPU, before any free choice."""
    return df.measure_importance(df.trace(net("cpu"), picture()), TaskOn(device="cpu"), RECIPE, method="trained")


# Workers choose a GPU. Without one they are those of tests/importance.
EXECUTORS = [InProcess, Processes] if torch.cuda.is_available() else [InProcess]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_importances_are_trained_on_the_best_of_the_machine(executor, device, trained_on_the_cpu, free_choice):
    traced = df.trace(net(device), picture(device))
    at = {"cpu": "cpu", "cuda": "cuda:0"}[free_choice]
    workers = InProcess() if executor is InProcess else Processes(devices=(at,))
    found = df.measure_importance(traced, TaskOn(device=free_choice), RECIPE, method="trained", executor=workers)
    assert kind(traced.graph) == device
    for one, two in zip(found.entries, trained_on_the_cpu.entries, strict=True):
        assert one.span == two.span and one.samples == pytest.approx(two.samples, abs=1e-3)


@pytest.mark.parametrize("method", ["brief", "recalibrated", "local", "fit"])
def test_methods_of_importance_run_on_the_best_of_the_machine(method, device, free_choice, monkeypatch):
    traced = df.trace(net(device), picture(device))
    found = df.measure_importance(traced, TaskOn(device=free_choice), RECIPE, method=method)
    assert kind(traced.graph) == device
    monkeypatch.setattr(EntryWorker, "device", torch.device("cpu"))
    expected = df.measure_importance(df.trace(net("cpu"), picture()), TaskOn(device="cpu"), RECIPE, method=method)
    for one, two in zip(found.entries, expected.entries, strict=True):
        assert one.span == two.span and one.samples == pytest.approx(two.samples, abs=1e-3)


def test_saved_on_one_device_it_is_loaded_where_the_model_is(device, tmp_path):
    shallow = merged_on(device)
    df.save(shallow, tmp_path)
    assert kind(shallow) == device
    for home in devices():
        loaded = df.load(tmp_path, Tiny().to(home))
        assert kind(loaded) == home
        assert equal(loaded.to(device), shallow)


def test_an_onnx_file_runs_without_the_device(device, tmp_path):
    shallow = merged_on(device)
    exported = df.export(shallow, tmp_path / "m.onnx")
    assert exported.environment.device == "cpu" and exported.error < 1e-4
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    found = session.run(None, {session.get_inputs()[0].name: picture().numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(found), outputs(merged_on("cpu"), "cpu"), **CLOSE)
    assert kind(shallow) == device


def test_a_program_of_pytorch_runs_on_the_device_of_its_network(device, tmp_path):
    shallow = merged_on(device)
    exported = df.export(shallow, tmp_path / "m.pt2")
    assert exported.batch == "dynamic" and exported.error < 1e-4
    program = torch.export.load(tmp_path / "m.pt2").module()
    assert {parameter.device.type for parameter in program.parameters()} == {kind(shallow)} == {device}
    torch.testing.assert_close(outputs(program, device), outputs(merged_on("cpu"), "cpu"), **CLOSE)


@pytest.mark.parametrize("at", devices())
def test_the_target_says_where_it_is_timed(at, device):
    model, target = net(device), f"pytorch:device={at}"
    traced = df.trace(model, picture(device))
    table = df.measure_latency(traced, target, timer=QUICK, networks=4)
    profile = df.profile(model, picture(device), target, timer=QUICK)
    name = "cpu" if at == "cpu" else torch.cuda.get_device_name()
    assert table.environment.device == profile.environment.device == name
    assert len(table.times) == len(table.entries) and profile.latency > 0
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert profile.memory > weights and profile.parameters == sum(p.numel() for p in model.parameters())
    assert kind(model) == kind(traced.graph) == device and equal(model, net(device))


def test_other_runtimes_take_a_network_from_any_device(device):
    inputs = torch.zeros(1, 2, SIZE, SIZE)
    expected = df.measure_latency(df.trace(net("cpu"), inputs), "cost_model", timer=QUICK)
    traced = df.trace(net(device), inputs.to(device))
    assert df.measure_latency(traced, "cost_model", timer=QUICK) == expected
    assert df.profile(traced.graph, inputs.to(device), "onnxruntime", timer=QUICK).environment.device == "cpu"
