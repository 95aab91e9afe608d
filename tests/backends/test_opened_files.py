"""Inputs that a runtime borrows stay where they are; a file that is opened runs as it says, or is refused."""

import gc
import weakref

import onnxruntime
import pytest
import torch
from torch import nn

from depthfold.backends import get

CONV = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, groups=2), nn.ReLU())
INPUTS = (torch.ones(2, 4, 8, 8),)


@pytest.fixture
def arrays(monkeypatch):
    """Weak references to the arrays whose memory ONNX Runtime borrows. Its bindings are as they were before version
    1.30: they keep nothing of what is bound."""
    borrowed, real = [], onnxruntime.OrtValue.ortvalue_from_numpy

    def value_of(array, *device):
        borrowed.append(weakref.ref(array))
        return real(array, *device)

    def bind(self, name, value):
        self._iobinding.bind_ortvalue_input(name, value._ortvalue)

    monkeypatch.setattr(onnxruntime.OrtValue, "ortvalue_from_numpy", value_of)
    monkeypatch.setattr(onnxruntime.IOBinding, "bind_ortvalue_input", bind)
    return borrowed


def test_a_session_keeps_the_memory_that_it_reads(arrays, tmp_path):
    backend = get("onnxruntime")
    path = backend.export(CONV, INPUTS, tmp_path / "a.onnx")
    for compiled in (backend.compile(CONV, INPUTS), backend.open(path, INPUTS)):
        gc.collect()
        array = arrays.pop(0)
        assert array() is not None
        compiled.close()
        gc.collect()
        assert array() is None


@pytest.mark.parametrize("target", ["onnxruntime", "openvino"])
def test_an_opened_file_keeps_the_inputs_that_it_was_given(target, tmp_path):
    backend, own = get(target), torch.randn(2, 4, 8, 8)
    suffix = {"onnxruntime": ".onnx", "openvino": ".xml"}[target]
    opened = backend.open(backend.export(CONV, INPUTS, tmp_path / f"a{suffix}"), (own,))
    expected = CONV(own).detach()
    own.zero_()
    torch.testing.assert_close(opened()[0], expected, rtol=1e-4, atol=1e-5)
