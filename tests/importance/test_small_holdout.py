"""A hold-out set that is too small to tell blocks apart gives a warning with the number of images it would take."""

from __future__ import annotations

import warnings

import torch
from torch import nn

import depthfold as df
from depthfold.importance import SmallHoldout, measure_importance
from tiny_importance import RECIPE, SIZE, TinyTask, tiny_network

GIVEN = []


class GivenScores(df.ClassificationTask):
    """A task whose scores are given one after another."""

    def score(self, model, split):
        return GIVEN.pop(0)


class GivenDivergences(df.ClassificationTask):
    """A task whose mean divergences, and their standard deviations over the images, are given one after another."""

    def divergences(self, outputs, reference):
        mean, deviation = GIVEN.pop(0)
        return mean + deviation * torch.tensor([-1.0, 1.0]).repeat(len(outputs) // 2)


def measured(kind, given, **options):
    """Measure a network of three layers with 100 hold-out images and these scores; return the warnings."""
    torch.manual_seed(0)
    layers = [(nn.Conv2d(2 if n == 0 else 4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for n in range(3)]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    traced = df.trace(nn.Sequential(*(m for layer in layers for m in layer), *head), torch.zeros(1, 2, SIZE, SIZE))
    images, labels = torch.randn(200, 2, SIZE, SIZE), torch.arange(200) % 2
    task = kind(source=df.ClassificationTask.tensors(train=(images, labels)).source, holdout=50)
    GIVEN[:] = given
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        measure_importance(traced, task, RECIPE, **options)
    assert not GIVEN
    return [each for each in caught if each.category is SmallHoldout]


def measure(blocks):
    """Return the warnings for these accuracies of the blocks of several layers."""
    # The others are of the original, and of the blocks that change nothing.
    return measured(GivenScores, [95.0, 20.0, *blocks], reinit=False)


def test_warning_has_the_errors_and_the_number_of_images():
    # The mean is 50%, so a score of 100 images has a standard error of 5 points. It must be half of the spread, 0.816.
    (warning,) = measure([49.0, 50.0, 51.0])
    assert str(warning.message) == (
        "The hold-out set of 100 images is too small to tell blocks apart: their accuracies have a standard deviation "
        "of 0.82 points, and each has a standard error of 5 points. It would take about 15000 images (holdout=...)."
    )
    assert warning.filename == __file__


def test_equal_scores_have_no_number_of_images():
    (warning,) = measure([100.0, 100.0, 100.0])
    assert str(warning.message).endswith(
        "a standard deviation of 0 points, and each has a standard error of 0.99 points. Use a larger hold-out set."
    )


def test_twice_the_standard_error_is_enough():
    assert not measure([37.5, 50.0, 62.5])  # a standard deviation of 10.2
    assert measure([38.0, 50.0, 62.0])  # of 9.8


def test_compared_outputs_have_the_error_of_their_divergences(tmp_path):
    # The spread of the means is 0.816, and the standard errors of the three blocks are 0.3, 0.5 and 0.7. The first one
    # is of the unchanged network, which is not among those that are told apart.
    given = [(0.5, 100.0), (1.0, 3.0), (2.0, 5.0), (3.0, 7.0)]
    (warning,) = measured(GivenDivergences, given, method="recalibrated", run=tmp_path)
    assert str(warning.message) == (
        "The hold-out set of 100 images is too small to tell blocks apart: their scores have a standard deviation of "
        "0.82, and each has a standard error of 0.5. It would take about 150 images (holdout=...)."
    )
    # Errors are journalled.
    (again,) = measured(GivenDivergences, [], method="recalibrated", run=tmp_path)
    assert str(again.message) == str(warning.message)
    assert not measured(GivenDivergences, [(0.5, 100.0), (1.0, 3.0), (2.0, 4.0), (3.0, 7.0)], method="recalibrated")


def test_scores_of_other_tasks_have_no_known_error():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measure_importance(tiny_network(), TinyTask(), RECIPE, method="recalibrated")
