"""Inputs stay in memory while a runtime uses them; options that contradict an opened file are refused."""

import copy
import gc
import logging
import weakref

import onnxruntime
import pytest
import torch
from torch import nn

from depthfold.backends import get
from depthfold.errors import BackendError, InvalidValue
from lacking import needs

CONV = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, groups=2), nn.ReLU())
INPUTS = (torch.ones(2, 4, 8, 8),)


@pytest.fixture
def arrays(monkeypatch):
    """Return weak references to the arrays that ONNX Runtime uses.

    Its bindings do not keep their values alive, as before version 1.30.
    """
    borrowed, real = [], onnxruntime.OrtValue.ortvalue_from_numpy

    def value_of(array, *device):
        borrowed.append(weakref.ref(array))
        return real(array, *device)

    def bind(self, name, value):
        self._iobinding.bind_ortvalue_input(name, value._ortvalue)

    monkeypatch.setattr(onnxruntime.OrtValue, "ortvalue_from_numpy", value_of)
    monkeypatch.setattr(onnxruntime.IOBinding, "bind_ortvalue_input", bind)
    return borrowed


def test_session_keeps_its_inputs_alive(arrays, tmp_path):
    backend = get("onnxruntime")
    path = backend.export(CONV, INPUTS, tmp_path / "a.onnx")
    for compiled in (backend.compile(CONV, INPUTS), backend.open(path, INPUTS)):
        gc.collect()
        array = arrays.pop(0)
        assert array() is not None
        compiled.close()
        gc.collect()
        assert array() is None


@pytest.mark.parametrize("target", ["onnxruntime", pytest.param("openvino", marks=needs("openvino")), "pytorch"])
def test_opened_file_copies_its_inputs(target, tmp_path):
    backend, own = get(target), torch.randn(2, 4, 8, 8)
    suffix = {"onnxruntime": ".onnx", "openvino": ".xml", "pytorch": ".pt2"}[target]
    opened = backend.open(backend.export(CONV, INPUTS, tmp_path / f"a{suffix}"), (own,))
    expected = CONV(own).detach()
    own.zero_()
    torch.testing.assert_close(opened()[0], expected, rtol=1e-4, atol=1e-5)


class RecordsAddresses(nn.Module):
    """A module that records the addresses of its inputs."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.addresses = inner, []

    def forward(self, *inputs):
        self.addresses.append([tensor.data_ptr() for tensor in inputs])
        return self.inner(*inputs)


@pytest.fixture
def programs(monkeypatch):
    """Return the programs that are opened, each in a module that records the addresses of its inputs."""
    opened, real = [], torch.export.load

    class Loaded:
        def __init__(self, path):
            self.program = real(path)

        def module(self):
            opened.append(RecordsAddresses(self.program.module()))
            return opened[-1]

    monkeypatch.setattr(torch.export, "load", Loaded)
    return opened


def test_opened_program_is_timed_without_copying_its_inputs(programs, tmp_path):
    opened = get("pytorch").open(get("pytorch").export(CONV, INPUTS, tmp_path / "a.pt2"), INPUTS)
    kept = [torch.empty(2, 4, 8, 8)]  # so that a copy of the inputs would get another address
    for _ in range(3):
        opened.seconds()
        kept.append(torch.empty(2, 4, 8, 8))
    addresses = programs[0].addresses[-4:]
    assert addresses.count(addresses[0]) == 4
    assert addresses[0] != [INPUTS[0].data_ptr()]


def test_program_that_modifies_its_inputs_is_repeatable(tmp_path):
    class Writes(nn.Module):
        def forward(self, x):
            return x.add_(1)

    opened = get("pytorch").open(get("pytorch").export(Writes(), INPUTS, tmp_path / "a.pt2"), INPUTS)
    for _ in range(2):
        opened.seconds()
        assert torch.equal(opened()[0], INPUTS[0] + 1)


REFUSED = {
    "precision=bfloat16": r"a\.pt2 computes in float32, not in precision=bfloat16, and .* Omit that option, or export",
    "precision=float16": r"a\.pt2 computes in float32, not in precision=float16,",
    "channels_last=true": r"a\.pt2 has a fixed memory format, not channels_last=true,",
}


@pytest.mark.parametrize("options", REFUSED)
def test_option_that_contradicts_the_program_is_refused(options, tmp_path):
    backend = get(f"pytorch:{options}")
    path = backend.export(CONV, INPUTS, tmp_path / "a.pt2")
    with pytest.raises(InvalidValue, match=REFUSED[options]):
        backend.open(path, INPUTS)


def test_program_that_cannot_be_loaded_is_an_error_without_a_traceback(tmp_path, monkeypatch, caplog):
    """torch.export.load logs the tracebacks of its attempts."""
    path = get("pytorch").export(CONV, INPUTS, tmp_path / "a.pt2")
    path.write_bytes(path.read_bytes()[:-100])
    monkeypatch.setattr(logging.getLogger("torch.export"), "handlers", [caplog.handler])
    with pytest.raises(BackendError, match=r"^PyTorch cannot load this program: "):
        get("pytorch").open(path, INPUTS)
    assert "Traceback" not in caplog.text


def test_program_on_another_device_is_refused(tmp_path):
    path = get("pytorch").export(copy.deepcopy(CONV).to("meta"), (INPUTS[0].to("meta"),), tmp_path / "a.pt2")
    with pytest.raises(InvalidValue, match=r"a\.pt2 has tensors on the device meta, not on device=cpu, and"):
        get("pytorch").open(path, INPUTS)


def test_program_in_the_requested_precision_is_opened(tmp_path):
    module, inputs = copy.deepcopy(CONV).bfloat16(), (INPUTS[0].bfloat16(),)
    path = get("pytorch").export(module, inputs, tmp_path / "a.pt2")
    for target in ("pytorch:precision=bfloat16", "pytorch"):
        assert torch.equal(get(target).open(path, inputs)()[0], module(*inputs).float())
    with pytest.raises(InvalidValue, match="computes in float32, not in precision=bfloat16"):
        get("pytorch:precision=bfloat16").open(path, INPUTS)
