"""Options that affect speed, checked in the settings that each runtime receives.

The conformance suite cannot detect a backend that ignores such an option, because only the speed changes.
"""

import copy
from unittest.mock import MagicMock

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from depthfold.backends import get, openvino, torch_run
from depthfold.backends.inductor import Inductor
from depthfold.backends.openvino import _core
from depthfold.backends.pytorch import PyTorch
from depthfold.backends.tensorrt import TensorRT
from depthfold.backends.torch_run import TorchOptions
from depthfold.errors import BackendError, InvalidValue
from lacking import needs

CONV = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.ReLU())
INPUTS = (torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0)),)
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LAST = torch.channels_last


@pytest.fixture
def watched():
    """Return a convolution, and a dict that its forward fills with dtypes and memory formats."""
    found = {}

    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 6, 3, padding=1)

        def forward(self, x):
            y = self.conv(x)
            maps = {"input": x, "weight": self.conv.weight, "output": y}
            found.update({name: (map.dtype, map.is_contiguous(memory_format=LAST)) for name, map in maps.items()})
            found["plain input"] = x.is_contiguous()
            return y

    return Watched(), found


def test_channels_last_of_volumes():
    module, found = nn.Sequential(nn.Conv3d(2, 3, 3), nn.Flatten(2), nn.Unflatten(2, (3, 9)), nn.Conv2d(3, 2, 3)), []
    for conv in (module[0], module[3]):
        conv.register_forward_pre_hook(lambda conv, given: found.append((conv.weight, *given)))
    get("pytorch:channels_last=true").compile(module, (torch.randn(2, 2, 5, 5, 5),))()
    (volumes, x), (images, _), *_ = found
    assert all(tensor.is_contiguous(memory_format=torch.channels_last_3d) for tensor in (volumes, x))
    assert images.is_contiguous(memory_format=LAST)


@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize("channels_last", [False, True])
def test_pytorch_uses_precision_and_memory_format_of_its_options(precision, channels_last, watched):
    module, found = watched
    backend = get(f"pytorch:precision={precision},channels_last={str(channels_last).lower()}")
    for given in (INPUTS[0], INPUTS[0].contiguous(memory_format=LAST)):
        found.clear()
        compiled = backend.compile(module, (given,))
        for run in (compiled, compiled.seconds):
            run()
            assert {found[name] for name in ("input", "weight", "output")} == {(TYPES[precision], channels_last)}
            assert found["plain input"] is not channels_last


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_has_a_larger_error(precision):
    expected = copy.deepcopy(CONV).double()(INPUTS[0].double()).detach()
    error = {
        kind: float((get(f"pytorch:precision={kind}").compile(CONV, INPUTS)()[0] - expected).abs().max())
        for kind in ("float32", precision)
    }
    digit = torch.finfo(TYPES[precision]).eps
    assert error["float32"] < digit / 100
    assert digit / 10 < error[precision] < 20 * digit


def test_matrices_keep_their_layout_and_integers_their_dtype():
    options = TorchOptions(device="cpu", precision="bfloat16", channels_last=True, threads=None)
    _, (numbers, index) = options.moved(CONV, (torch.randn(3, 5), torch.arange(4)))
    assert (numbers.dtype, numbers.is_contiguous(), index.dtype) == (torch.bfloat16, True, torch.int64)


@pytest.mark.parametrize("options", ["", "precision=bfloat16,", "channels_last=true,", "mode=max-autotune,"])
def test_inductor_uses_precision_memory_format_and_mode_of_its_options(options, monkeypatch):
    tensors, modes, real = [], [], torch.compile

    def spy(function, *, mode, dynamic):
        modes.append((mode, dynamic))
        return real(function, backend=lambda graph, given: tensors.extend(given) or graph.forward, dynamic=False)

    monkeypatch.setattr(torch, "compile", spy)
    get(f"inductor:{options}threads=1").compile(CONV, INPUTS)
    maps = [tensor for tensor in tensors if tensor.dim() == 4]
    assert len(maps) == 2  # input and weight
    assert {map.dtype for map in maps} == {torch.bfloat16 if "bfloat16" in options else torch.float32}
    assert {map.is_contiguous(memory_format=LAST) for map in maps} == {"channels_last" in options}
    assert modes == [("max-autotune" if "mode" in options else "default", False)]


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_tf32_is_on_unless_precision_is_float32(precision):
    options = TorchOptions(device="cuda", precision=precision, channels_last=False, threads=None)
    with options.settings():
        allowed = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
        assert allowed == (precision != "float32",) * 2
        assert torch.backends.cudnn.benchmark
        assert torch.is_inference_mode_enabled()


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("kind", [PyTorch, Inductor])
def test_cuda_graphs_option_captures_the_forward(kind, cuda_graphs, monkeypatch):
    """The capture is replaced, because there is none on a CPU."""
    monkeypatch.setattr(torch_run, "capture_cuda_graph", lambda forward: lambda: (torch.ones(1),))
    backend = kind(device="cuda", cuda_graphs=cuda_graphs)
    options = TorchOptions(device="cpu", precision="float32", channels_last=False, threads=None)
    assert backend._run(options, lambda: (torch.zeros(1),))()[0].item() == cuda_graphs


LEVELS = {"none": "DISABLE_ALL", "basic": "ENABLE_BASIC", "extended": "ENABLE_EXTENDED", "all": "ENABLE_ALL"}


@pytest.mark.parametrize("level", LEVELS)
def test_onnx_runtime_receives_the_optimisation_level(level):
    session = get(f"onnxruntime:optimisation={level}").compile(CONV, INPUTS)._session
    found = session.get_session_options().graph_optimization_level
    assert found == getattr(onnxruntime.GraphOptimizationLevel, f"ORT_{LEVELS[level]}")


def test_onnx_runtime_defaults():
    options = get("onnxruntime").compile(CONV, INPUTS)._session.get_session_options()
    assert options.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    assert options.get_session_config_entry("session.force_spinning_stop") == "1"
    assert options.inter_op_num_threads == 1


@pytest.fixture
def requested(monkeypatch):
    """Return a list that collects (model, providers) of each session of an ONNX Runtime with GPU providers."""
    sessions = []
    names = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: names)

    def session(model, options, *, providers):
        sessions.append((onnx.load_from_string(model), providers))
        raise InvalidValue("There is no GPU here.")

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    return sessions


PROVIDERS = {
    "providers=CUDAExecutionProvider+CPUExecutionProvider": {"use_tf32": "0"},
    "providers=CUDAExecutionProvider+CPUExecutionProvider,precision=tf32": {"use_tf32": "1"},
    "providers=CUDAExecutionProvider+CPUExecutionProvider,precision=float16": {"use_tf32": "1"},
    "providers=TensorrtExecutionProvider+CPUExecutionProvider,precision=tf32": {"trt_fp16_enable": "False"},
    "providers=TensorrtExecutionProvider+CPUExecutionProvider,precision=float16": {"trt_fp16_enable": "True"},
}


@pytest.mark.parametrize("options", PROVIDERS)
def test_onnx_runtime_receives_the_precision(options, requested):
    with pytest.raises(InvalidValue, match="no GPU here"):
        get(f"onnxruntime:{options}").compile(CONV, INPUTS)
    ((model, providers),) = requested
    first = options.removeprefix("providers=").partition("+")[0]
    assert providers == [(first, PROVIDERS[options]), "CPUExecutionProvider"]
    kind = onnx.TensorProto.FLOAT16 if "float16" in options else onnx.TensorProto.FLOAT
    assert {info.type.tensor_type.elem_type for info in model.graph.input} == {kind}
    assert {tensor.data_type for tensor in model.graph.initializer if len(tensor.dims) == 4} == {kind}


def openvino_with(supported, properties_seen):
    """Return a Core for a CPU that supports these precisions. It appends the properties of each model to the list."""
    core = _core()

    class Core:
        read_model = core.read_model

        def get_property(self, device, name):
            return core.get_property(device, name) if name != "OPTIMIZATION_CAPABILITIES" else supported

        def compile_model(self, model, device, properties):
            properties_seen.append(properties)
            return core.compile_model(model, device, {**properties, "INFERENCE_PRECISION_HINT": "f32"})

    return Core


@pytest.mark.parametrize(("precision", "hint"), [("float32", "f32"), ("bfloat16", "bf16"), ("float16", "f16")])
@needs("openvino")
def test_openvino_receives_the_precision(precision, hint, monkeypatch):
    asked = []
    monkeypatch.setattr(openvino, "_core", openvino_with(["FP32", "BF16", "FP16"], asked))
    get(f"openvino:precision={precision},threads=1").compile(CONV, INPUTS)
    expected = {"INFERENCE_PRECISION_HINT": hint, "PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1}
    assert asked == [{**expected, "INFERENCE_NUM_THREADS": 1}]


@needs("openvino")
def test_openvino_refuses_a_precision_that_the_cpu_does_not_support(monkeypatch):
    """Otherwise OpenVINO would silently compute in another precision."""
    asked = []
    monkeypatch.setattr(openvino, "_core", openvino_with(["FP32", "INT8", "FP16"], asked))
    backend = get("openvino:precision=bfloat16")
    for use in (backend.environment, lambda inputs: backend.compile(CONV, inputs)):
        with pytest.raises(BackendError, match=r"cannot compute in bfloat16 on this CPU.*precision=float32 or "):
            use(INPUTS)
    assert not asked
    assert get("openvino:precision=float16").environment(INPUTS).precision == "float16"


@pytest.mark.parametrize(
    ("precision", "flags"), [("float32", []), ("tf32", ["TF32"]), ("float16", ["TF32", "FP16"])], ids=str
)
def test_tensorrt_receives_precision_and_optimisation_level(precision, flags):
    library = MagicMock()
    config = library.Builder.return_value.create_builder_config.return_value
    found = {"TF32"}  # TensorRT's default
    config.set_flag.side_effect = found.add
    config.clear_flag.side_effect = found.discard
    library.BuilderFlag.TF32, library.BuilderFlag.FP16 = "TF32", "FP16"
    TensorRT(precision=precision, optimisation=5)._engine(library, CONV, INPUTS)
    assert found == set(flags)
    assert config.builder_optimization_level == 5


def test_engine_from_another_machine_is_refused():
    library = MagicMock(__version__="10.9")
    library.Runtime.return_value.deserialize_cuda_engine.return_value = None
    with pytest.raises(
        BackendError, match=r"TensorRT 10\.9 cannot load this engine, .* Export it again on this machine"
    ):
        TensorRT()._run(library, b"engine", INPUTS)
