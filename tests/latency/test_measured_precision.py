"""Networks in float64 and float16 on runtimes with another precision."""

import pytest
import torch
from torch import nn

import depthfold as df
from cli_workshop import without_memory
from depthfold.backends import get
from depthfold.core import Score
from depthfold.latency import choose, measure_latency, profile
from lacking import needs
from latency_workshop import QUICK

TARGETS = ("cost_model", "pytorch", "onnxruntime", pytest.param("openvino", marks=needs("openvino")))
PRECISIONS = (torch.float64, torch.float16)


def model():
    torch.manual_seed(0)
    layers = [layer for n in range(3) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 64, 3))


X = torch.randn(2, 4, 8, 8)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("target", TARGETS)
def test_network_is_measured_in_the_precision_of_the_runtime(target, precision):
    traced = df.trace(model().to(precision), X.to(precision))
    table = measure_latency(traced, target, timer=QUICK, networks=4)
    assert len(table.times) == len(table.entries) and table.environment.precision == "float32"
    scores = tuple(Score(span=span, samples=(-float(len(span.span)),)) for span in traced.flagged_spans())
    frontier = df.solve(table, df.ImportanceTable(entries=scores))
    chosen = choose(traced, frontier, "1e6ms", target, timer=QUICK)  # a budget that every plan meets
    assert chosen.importance == max(plan.importance for plan in frontier)
    assert traced.example_tensors()[0].dtype == precision  # the traced network is unchanged


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("target", TARGETS)
def test_compiled_network_computes_the_same_as_in_float32(target, precision):
    module = model().eval()
    compiled = get(target).compile(module.to(precision), (X.to(precision),))
    (found,) = compiled()
    compiled.close()
    assert found.dtype == torch.float32
    with torch.no_grad():
        expected = module.float()(X.to(precision).float())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_profile_of_a_float64_network_is_that_of_float32():
    with without_memory():  # its process takes seconds
        one = profile(model(), X, "cost_model", timer=QUICK)
        assert profile(model(), X.double(), "pytorch", timer=QUICK).flops == one.flops
    two = profile(model().double(), X.double(), "cost_model", timer=QUICK)
    assert (one.quartiles, one.count, one.flops, one.parameters) == (
        two.quartiles,
        two.count,
        two.flops,
        two.parameters,
    )
    assert one.environment == two.environment and two.memory is not None


def test_files_keep_the_precision_of_the_network(tmp_path):
    path = get("onnxruntime").export(model().double(), (X.double(),), tmp_path / "double.onnx")
    import onnx

    (graph_input,) = onnx.load(path).graph.input
    assert graph_input.type.tensor_type.elem_type == onnx.TensorProto.DOUBLE
