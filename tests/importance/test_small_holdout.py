"""A hold-out set that is too small to tell blocks apart gives a warning with the number of images it would take."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import depthfold as df
from depthfold.importance import SmallHoldout, measure_importance
from tiny_importance import RECIPE, SIZE, TinyTask, images, tiny_network

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
    data = torch.randn(200, 2, SIZE, SIZE), torch.arange(200) % 2
    task = kind(source=df.ClassificationTask.tensors(train=data).source, holdout=50)
    GIVEN[:] = given
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        measure_importance(traced, task, RECIPE, **options)
    assert not GIVEN
    return [each for each in caught if each.category is SmallHoldout]


def measure(blocks):
    """Return the warnings for these accuracies of the blocks of several layers."""
    # The others are of the original, and of the blocks that change nothing.
    return measured(GivenScores, [95.0, 20.0, *blocks], method="trained", reinit=False)


def test_warning_has_the_errors_and_the_number_of_images():
    # The mean is 50%, so an accuracy of 100 images has a standard error of 5 points. That is a part of the standard
    # deviation, 6.53: the true accuracies have a standard deviation of sqrt(6.53^2 - 5^2) = 4.20.
    (warning,) = measure([42.0, 50.0, 58.0])
    assert str(warning.message) == (
        "The hold-out set of 100 images is too small to tell blocks apart: their accuracies have a standard deviation "
        "of 6.5 points, and each has a standard error of 5 points. It would take about 425 images (holdout=...)."
    )
    assert warning.filename == __file__
    true = 128 / 3 - 25
    for number, enough in ((425, True), (424, False)):
        error = 2500 / number  # squared, as is the standard deviation that would then be measured
        assert (true + error >= 2**2 * error) == enough


@pytest.mark.parametrize(
    ("accuracies", "spread", "error"), [([100.0, 100.0, 100.0], "0", "0.99"), ([49.0, 50.0, 51.0], "0.82", "5")]
)
def test_no_number_of_images_follows_from_chance_alone(accuracies, spread, error):
    (warning,) = measure(accuracies)
    assert str(warning.message).endswith(
        f"a standard deviation of {spread} points, and each has a standard error of {error} points. Use a larger "
        "hold-out set."
    )


def test_twice_the_standard_error_is_enough():
    assert not measure([37.5, 50.0, 62.5])  # a standard deviation of 10.2
    assert measure([38.0, 50.0, 62.0])  # of 9.8


def test_compared_outputs_have_the_error_of_their_divergences(tmp_path):
    # The spread of the means is 0.816, and the standard errors of the three blocks are 0.3, 0.45 and 0.7. The first
    # one is of the unchanged network, which is not among those that are told apart.
    # 100 * 3 * 0.45^2 / (0.816^2 - 0.45^2) = 130.9
    given = [(0.5, 100.0), (1.0, 3.0), (2.0, 4.5), (3.0, 7.0)]
    (warning,) = measured(GivenDivergences, given, method="recalibrated", run=tmp_path)
    assert str(warning.message) == (
        "The hold-out set of 100 images is too small to tell blocks apart: their scores have a standard deviation of "
        "0.82, and each has a standard error of 0.45. It would take about 131 images (holdout=...)."
    )
    # Errors are journalled.
    (again,) = measured(GivenDivergences, [], method="recalibrated", run=tmp_path)
    assert str(again.message) == str(warning.message)
    assert not measured(GivenDivergences, [(0.5, 100.0), (1.0, 3.0), (2.0, 4.0), (3.0, 7.0)], method="recalibrated")


class Comparing(TinyTask):
    """A task of another kind that compares outputs, by given divergences of three inputs."""

    def outputs(self, model, split):
        return model(images(3, 77)[0])

    def divergences(self, outputs, reference):
        return (outputs - reference).square().sum(1) + torch.tensor([-1.0, 0.0, 1.0]) * 100


def test_other_tasks_that_compare_outputs_are_warned_about():
    with pytest.warns(
        SmallHoldout, match=r"^The hold-out set of 3 inputs is too small .*\. Use a larger hold-out set\.$"
    ):
        measure_importance(tiny_network(), Comparing(), RECIPE, method="recalibrated")


def test_scores_of_other_tasks_have_no_known_error():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measure_importance(tiny_network(), TinyTask(), RECIPE, method="recalibrated")
