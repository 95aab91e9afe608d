"""Single runtimes: global settings, missing libraries, exported files and the cost formula."""

import sys
from pathlib import Path

import onnxruntime
import pytest
import torch
from torch import nn

from depthfold.backends import get
from depthfold.backends.cost_model import CostModel
from depthfold.backends.cuda import cuda_settings
from depthfold.backends.machine import machine_name
from depthfold.backends.openvino import _core
from depthfold.errors import BackendError, InvalidValue, MissingDependency, OutOfMemory
from lacking import library, needs

CONV = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, groups=2), nn.ReLU())
INPUTS = (torch.ones(2, 4, 8, 8),)


def test_threads_are_set_only_during_a_run():
    class Threads(nn.Module):
        def forward(self, x):
            return x + torch.get_num_threads()

    before = torch.get_num_threads()
    backend = get(f"pytorch:threads={before + 1}")
    compiled = backend.compile(Threads(), (torch.zeros(1, 1),))
    assert compiled()[0].item() == before + 1
    assert backend.environment(INPUTS).threads == before + 1
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    "target", ["pytorch", "onnxruntime", pytest.param("openvino", marks=needs("openvino")), "cost_model"]
)
def test_surrounding_autocast_changes_nothing(target):
    inputs = (torch.randn(2, 4, 8, 8),)
    before = get(target).compile(CONV, inputs)
    (expected,) = before()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for compiled in (before, get(target).compile(CONV, inputs)):
            compiled.seconds()
            torch.testing.assert_close(compiled()[0], expected, rtol=1e-5, atol=1e-6)
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("threads", [1, torch.get_num_threads() + 1])
@needs("openvino")
def test_runtimes_receive_the_number_of_threads(threads):
    session = get(f"onnxruntime:threads={threads}").compile(CONV, INPUTS)._session
    assert session.get_session_options().intra_op_num_threads == threads
    request = get(f"openvino:threads={threads}").compile(CONV, INPUTS)._request
    assert request.get_compiled_model().get_property("INFERENCE_NUM_THREADS") == threads
    for runtime in ("onnxruntime", "openvino"):
        assert get(f"{runtime}:threads={threads}").environment(INPUTS).threads == threads


@needs("openvino")
def test_threads_default_to_those_of_pytorch():
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        session = get("onnxruntime").compile(CONV, INPUTS)._session
        request = get("openvino").compile(CONV, INPUTS)._request
    finally:
        torch.set_num_threads(before)
    assert session.get_session_options().intra_op_num_threads == before + 1
    assert request.get_compiled_model().get_property("INFERENCE_NUM_THREADS") == before + 1


def test_machine_name_contains_the_processor(monkeypatch):
    def named(text):
        machine_name.cache_clear()
        monkeypatch.setattr(Path, "read_text", lambda *_, **__: text)
        return machine_name()

    assert ", AMD EPYC 9654, " in named("processor : 0\nmodel name : AMD EPYC 9654\nprocessor : 1\n")
    assert ", Neoverse-N1, " in named("CPU implementer : 0x41\nCPU part : 0xd0c\n")
    assert ", processor 0x61/0x022, " in named("CPU implementer : 0x61\nCPU part : 0x022\n")
    machine_name.cache_clear()


def test_environment_needs_a_batch():
    for inputs in ((), (torch.tensor(1.0),)):
        with pytest.raises(InvalidValue, match="tensors whose first dimension is the batch"):
            get("pytorch").environment(inputs)


def precisions():
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    return cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision, matmul.fp32_precision, cudnn.benchmark


def test_tf32_is_set_in_both_apis_and_restored():
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    start = precisions()
    for tf32 in (True, False):
        with cuda_settings(tf32=tf32, benchmark=True):
            assert (cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark) == (tf32, tf32, True)
            assert (matmul.fp32_precision == "tf32", cudnn.conv.fp32_precision == "tf32") == (tf32, tf32)
        assert precisions() == start


def test_tf32_set_by_the_user_is_restored():
    start = precisions()
    try:
        torch.backends.cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision = "ieee", "tf32"
        own = precisions()
        for tf32 in (True, False):
            with cuda_settings(tf32=tf32, benchmark=True):
                pass
            assert precisions() == own
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = start[0] == "tf32", start[2] == "tf32"
        torch.backends.cuda.matmul.fp32_precision = start[2]


@pytest.mark.parametrize(
    ("target", "library", "extra"),
    [
        ("onnxruntime", "onnxruntime", "onnx"),
        ("onnxruntime", "onnx", "onnx"),
        ("openvino", "openvino", "openvino"),
        pytest.param("openvino", "onnx", "openvino", marks=needs("openvino")),
    ],
)
def test_missing_library_is_named_with_its_extra(target, library, extra, monkeypatch):
    _core.cache_clear()
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingDependency, match=rf"{library} is not installed.*pip install -e .\.\[{extra}\]."):
        get(target).compile(CONV, INPUTS)


def test_missing_tensorrt_is_explained(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    for use in (get("tensorrt").compile, lambda *given: get("tensorrt").export(*given, "model.engine")):
        with pytest.raises(MissingDependency, match=r"tensorrt is not installed.*\.\[tensorrt\]"):
            use(CONV, INPUTS)


def test_broken_library_is_not_reported_as_missing(tmp_path, monkeypatch):
    (tmp_path / "tensorrt.py").write_text("raise ImportError('libnvinfer.so.10: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MissingDependency, match="tensorrt does not load: libnvinfer"):
        get("tensorrt").compile(CONV, INPUTS)


def test_unknown_provider_is_refused():
    with pytest.raises(
        BackendError, match=r"This ONNX Runtime has no MyExecutionProvider; it has .*CPUExecutionProvider"
    ):
        get("onnxruntime:providers=MyExecutionProvider").compile(CONV, INPUTS)


def test_missing_cuda_device_is_a_backend_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for target in ("pytorch:device=cuda", "inductor:device=cuda"):
        with pytest.raises(BackendError, match="finds no CUDA device"):
            get(target).compile(CONV, INPUTS)
        with pytest.raises(BackendError, match="finds no CUDA device"):
            get(target).environment(INPUTS)


def test_memory_error_becomes_out_of_memory():
    class Hungry(nn.Module):
        def forward(self, x):
            return x.new_empty(1 << 50)

    with pytest.raises(OutOfMemory, match=r"PyTorch cannot run this module: .*memory"):
        get("pytorch").compile(Hungry(), INPUTS)


def test_closed_module_does_not_run():
    compiled = get("pytorch").compile(CONV, INPUTS)
    compiled.close()
    with pytest.raises(InvalidValue, match="closed"):
        compiled()


def test_inputs_must_be_a_tuple_of_tensors():
    for target in ("pytorch", "onnxruntime", "openvino", "cost_model"):
        with pytest.raises(InvalidValue, match="compiled for a tuple of tensors, found"):
            get(target).compile(CONV, ())


def test_inductor_compiles_every_module_of_a_class(monkeypatch):
    """torch.compile gives up after a few variants of the same code object."""
    graphs = []
    real = torch.compile

    def spy(function, **options):
        return real(function, backend=lambda graph, inputs: graphs.append(graph) or graph.forward, dynamic=False)

    monkeypatch.setattr(torch, "compile", spy)
    for channels in range(1, 15):
        get("inductor").compile(nn.Sequential(nn.Conv2d(channels, 2, 1)), (torch.ones(1, channels, 4, 4),))
    assert len(graphs) == 14


def test_missing_compiler_is_explained(monkeypatch):
    def broken(graph, inputs):
        raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found")

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: real(function, backend=broken))
    with pytest.raises(MissingDependency, match=r"needs a C\+\+ compiler such as g\+\+"):
        get("inductor").compile(CONV, INPUTS)


@needs("openvino")
def test_exported_files_load_without_depthfold(tmp_path):
    expected = CONV(*INPUTS)
    program = torch.export.load(get("pytorch").export(CONV, INPUTS, tmp_path / "a.pt2"))
    torch.testing.assert_close(program.module()(*INPUTS), expected)
    session = onnxruntime.InferenceSession(get("onnxruntime").export(CONV, INPUTS, tmp_path / "a.onnx"))
    output = session.run(None, {session.get_inputs()[0].name: INPUTS[0].numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(output), expected)
    model = library("openvino").compile_model(get("openvino").export(CONV, INPUTS, tmp_path / "a.xml"), "CPU")
    torch.testing.assert_close(torch.from_numpy(model(INPUTS[0].numpy())[0]), expected, rtol=1e-2, atol=1e-2)
    assert CONV.training


def test_wrong_suffix_is_refused(tmp_path):
    with pytest.raises(InvalidValue, match=r"end in \.onnx, found 'a\.bin'\. Use a\.onnx"):
        get("onnxruntime").export(CONV, INPUTS, tmp_path / "a.bin")
    for target in ("cost_model", "inductor"):
        with pytest.raises(BackendError, match="Export with"):
            get(target).export(CONV, INPUTS, tmp_path / "a.bin")


def test_cost_model_computes_the_formula():
    backend = CostModel(network_us=7, launch_us=3, gflops=2, gbytes=5)
    flops, numbers = 2 * (2 * 6 * 8 * 8) * (2 * 3 * 3), 2 * 4 * 8 * 8 + 6 * 2 * 3 * 3 + 2 * 6 * 8 * 8
    expected = 7e-6 + 3e-6 + flops / 2e9 + 4 * numbers / 5e9
    assert backend.compile(CONV, INPUTS).seconds() == pytest.approx(expected, rel=1e-12)
    twice = nn.Sequential(CONV, nn.Conv2d(6, 6, 1))
    more = 3e-6 + 2 * (2 * 6 * 64) * 6 / 2e9 + 4 * (2 * 2 * 6 * 64 + 36) / 5e9
    assert backend.compile(twice, INPUTS).seconds() == pytest.approx(expected + more, rel=1e-12)


def test_noise_depends_on_the_seed():
    def samples(seed):
        compiled = CostModel(noise=0.1, seed=seed).compile(CONV, INPUTS)
        return [compiled.seconds() for _ in range(5)]

    assert samples(1) == samples(1) != samples(2)
    assert len(set(samples(1))) == 5
