"""Backends by name, with options, and from entry points."""

import sys
from dataclasses import FrozenInstanceError, dataclass
from typing import ClassVar

import pytest
import torch

from depthfold.backends import Backend, available, get
from depthfold.backends.inductor import Inductor
from depthfold.backends.onnxruntime import OnnxRuntime
from depthfold.backends.pytorch import PyTorch
from depthfold.backends.registry import describe_target
from depthfold.errors import BackendError, InvalidValue, MissingDependency


@dataclass(frozen=True)
class Half:
    name: ClassVar[str] = "half"
    level: int = 2
    export = None

    def compile(self, module, inputs): ...


def test_get_returns_a_backend_by_name():
    assert get("pytorch") == PyTorch()
    assert isinstance(get("pytorch"), Backend)


def test_get_returns_instances_unchanged():
    backend = PyTorch(threads=1)
    assert get(backend) is backend


def test_built_in_names():
    assert available() == ("cost_model", "inductor", "onnxruntime", "openvino", "pytorch", "tensorrt")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pytorch:", PyTorch()),
        (
            "pytorch: device=cuda, precision=tf32 ,cuda_graphs=True",
            PyTorch(device="cuda", precision="tf32", cuda_graphs=True),
        ),
        ("pytorch:threads=2,channels_last=false", PyTorch(threads=2)),
        ("pytorch:threads=none", PyTorch()),
        (
            "onnxruntime:precision=tf32,providers=CUDAExecutionProvider+CPUExecutionProvider",
            OnnxRuntime(precision="tf32", providers=("CUDAExecutionProvider", "CPUExecutionProvider")),
        ),
    ],
)
def test_options_are_read_from_text(text, expected):
    found = get(text)
    assert found == expected
    assert get(describe_target(found)) == found


def test_describe_target_omits_defaults_and_named_options():
    backend = PyTorch(device="cuda", cuda_graphs=True, threads=2)
    assert describe_target(backend) == "pytorch:device=cuda,cuda_graphs=true,threads=2"
    assert describe_target(backend, without=("device", "threads")) == "pytorch:cuda_graphs=true"
    assert describe_target(PyTorch()) == "pytorch"


def test_runtime_lists_the_options_in_the_order_of_the_fields():
    """Existing tables stay valid, because the name of the runtime does not change."""
    x = (torch.ones(1, 3, 4, 4),)
    eager, compiled = PyTorch(channels_last=True, threads=1), Inductor(channels_last=True, mode="max-autotune")
    assert eager.environment(x).runtime == "pytorch:channels_last=true"
    assert compiled.environment(x).runtime == "inductor:mode=max-autotune,channels_last=true"
    assert (eager.environment(x).threads, eager.environment(x).precision) == (1, "float32")
    for backend in (eager, compiled):
        assert not hasattr(backend, "__dict__")
        with pytest.raises(FrozenInstanceError):
            backend.device = "cuda"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("pytoch", "There is no backend 'pytoch'. Did you mean 'pytorch'? Known backends: cost_model, inductor"),
        ("", "There is no backend ''. Known backends:"),
        (
            "pytorch:devise=cuda",
            "has no option 'devise'. Did you mean 'device'? Its options and their defaults: device",
        ),
        ("pytorch:device", "cannot read 'device'"),
        ("pytorch:threads=1,threads=2", "cannot read 'threads=2'"),
        ("pytorch:threads=two", "The option 'threads' of the backend 'pytorch' cannot be 'two'."),
        ("pytorch:cuda_graphs=maybe", "cannot be 'maybe'. Its options and their defaults: device=cpu (cpu | cuda)"),
        ("pytorch:precision=fp16", "precision=float32 (float32 | tf32 | bfloat16 | float16)"),
        ("cost_model:gflops=fast", "gflops=50.0 (float)"),
        ("onnxruntime:x=1", "providers=CPUExecutionProvider (str+...)"),
        ("pytorch:threads=0", "must be at least 1, found 0"),
        ("pytorch:precision=tf32", "TF32 needs a CUDA device"),
        ("pytorch:cuda_graphs=true", "CUDA graphs need a CUDA device"),
        ("onnxruntime:precision=float16", "computes in float32, not in float16"),
        ("tensorrt:optimisation=9", "must be from 0 to 5, found 9"),
        ("cost_model:gflops=0", "must be above 0"),
        (PyTorch, "Expected a backend or the name of one"),
        (7, "found 7. It does not have environment(), compile(), export(), name."),
        (PyTorch, "It is a class: pass an instance, PyTorch()."),
        (Half(), "found Half(level=2). It does not have environment(), export(). Known backends: cost_model"),
    ],
)
def test_invalid_target_gives_a_clear_error(target, message):
    with pytest.raises(InvalidValue) as caught:
        get(target)
    assert message in str(caught.value)


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Install a package that registers backends."""
    (tmp_path / "toy_backend.py").write_text(
        "from dataclasses import dataclass\n"
        "from depthfold.backends.cost_model import CostModel\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Toy(CostModel):\n"
        "    name = 'toy'\n"
        "    level: int = 1\n"
        "nothing = 3\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Bare:\n"
        "    level: int = 1\n"
        "    def compile(self, module, inputs): ...\n"
    )
    info = tmp_path / "toy_backend-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-backend\nVersion: 1.0\n")
    (tmp_path / "toy_outdated.py").write_text("raise RuntimeError('needs a newer\\ndriver')\n")
    (tmp_path / "toy_lacking.py").write_text("import toy_library_that_is_not_there\n")
    values = {
        "toy": "toy_backend:Toy",
        "broken": "toy_backend:nothing",
        "bare": "toy_backend:Bare",
        "gone": "toy_backend:Gone",
        "lacking": "toy_lacking:Toy",
        "outdated": "toy_outdated:Toy",
    }
    points = "\n".join(f"{name} = {value}" for name, value in values.items())
    (info / "entry_points.txt").write_text(f"[depthfold.backends]\n{points}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("toy_backend", None)


def test_get_finds_entry_points(plugin):
    assert "toy" in available()
    assert "toy_backend" not in sys.modules  # it is imported on first use
    assert get("toy:level=4").level == 4
    with pytest.raises(InvalidValue, match="Did you mean 'toy'"):
        get("toyy")


def test_entry_point_must_be_a_dataclass(plugin):
    with pytest.raises(InvalidValue, match="must be a dataclass whose fields are the options"):
        get("broken")


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        (
            "lacking",
            MissingDependency,
            "'lacking' of the group 'depthfold.backends' (toy_lacking:Toy, package toy-backend) cannot be "
            "imported: No module named 'toy_library_that_is_not_there'. Install its dependencies",
        ),
        (
            "outdated",
            BackendError,
            "(toy_outdated:Toy, package toy-backend) cannot be loaded: RuntimeError: needs a newer driver. Update",
        ),
        ("gone", BackendError, "(toy_backend:Gone, package toy-backend) cannot be loaded: AttributeError: module"),
        (
            "bare:level=3",
            InvalidValue,
            "(toy_backend:Bare, package toy-backend) is not a backend. It does not have environment(), export(), name.",
        ),
    ],
)
def test_error_of_an_entry_point_names_its_package(plugin, name, kind, message):
    with pytest.raises(kind) as caught:
        get(name)
    assert message in str(caught.value)
    assert get("toy").level == 1  # the others still work
