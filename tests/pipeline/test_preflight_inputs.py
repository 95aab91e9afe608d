"""compress() refuses example inputs that fit neither the task nor the exported files before anything is measured."""

import importlib

import pytest
import torch
from torch import nn

import depthfold as df
from depthfold.errors import DataError, InvalidValue
from depthfold.training import FunctionTask


class MeasuredTooEarly(Exception):
    """The run has reached its first measurement."""


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch):
    def stop(*_, **__):
        raise MeasuredTooEarly

    monkeypatch.setattr(importlib.import_module("depthfold.pipeline.artefacts"), "make_latency_table", stop)


def model():
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)).eval()


def task(**options):
    pair = torch.rand(24, 1, 8, 8), torch.arange(24) % 3
    return df.ClassificationTask.tensors(train=pair, test=pair, holdout=0.25, **options)


def test_images_of_another_size_than_the_measured_one_are_refused(tmp_path):
    other = torch.rand(1, 1, 12, 10)

    def compress(given, exports=("m.pt2",), **inputs):
        options = df.Options(exports=exports)
        df.compress(model(), given, "cost_model", "80%", run=tmp_path / "run", options=options, **inputs)

    with pytest.raises(DataError, match=r"are 8x8, and .* model 12x10\. Give .* of 8x8, .* images to 12x10\."):
        compress(task(), example_inputs=other)
    with pytest.raises(DataError, match="task are 8x8"):
        compress(task(), traced=df.trace(model(), other))
    assert not (tmp_path / "run").exists()
    with pytest.raises(MeasuredTooEarly):
        compress(task(size=(12, 10)), example_inputs=other)
    with pytest.raises(MeasuredTooEarly):  # without files, nothing would contradict itself
        compress(task(), exports=(), example_inputs=other)


class OfLists(nn.Module):
    """Takes a list of images, as the detectors of torchvision do."""

    def __init__(self):
        super().__init__()
        self.body = model()

    def forward(self, images):
        return self.body(torch.stack(images))


def test_inputs_that_no_file_can_take_are_refused(tmp_path):
    own = FunctionTask(loss=max, score=max, epoch_steps=1)
    example = (list(torch.rand(2, 1, 8, 8)),)

    def compress(**options):
        options = df.Options(at="body", **options)
        df.compress(OfLists(), own, "cost_model", "80%", run=tmp_path / "run", example_inputs=example, options=options)

    with pytest.raises(InvalidValue, match=r"accepts only positional tensors .* found list .* exports=\(\)"):
        compress()
    assert not (tmp_path / "run").exists()
    with pytest.raises(MeasuredTooEarly):
        compress(exports=())
