"""The hold-out set: separate from the training set, reproducible, and taken from each class."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from depthfold.errors import DataError, InvalidValue
from depthfold.tasks.images import MemoryImages
from depthfold.tasks.source import DatasetPart
from depthfold.tasks.splits import check_holdout, split_holdout


def part(y, classes=None, keys=None):
    classes = classes or max(y) + 1
    return DatasetPart(
        where="here",
        classes=tuple(f"c{n}" for n in range(classes)),
        labels=torch.tensor(y),
        keys=keys or range(len(y)),
        images=MemoryImages(pixels=torch.zeros(len(y), 1, 1, 1, dtype=torch.uint8)),
    )


@given(
    counts=st.lists(st.integers(2, 40), min_size=1, max_size=6),
    holdout=st.sampled_from([0, 1, 0.1, 0.4]),
    seed=st.integers(0, 5),
)
def test_split_is_complete_and_covers_every_class(counts, holdout, seed):
    y = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts)).tolist()
    kept, held = split_holdout(part(y), holdout, seed)
    assert sorted(kept + held) == list(range(len(y)))
    assert not {*kept} & {*held}
    of_class = np.bincount([y[i] for i in held], minlength=len(counts)).tolist()
    assert of_class == [holdout if isinstance(holdout, int) else max(1, round(holdout * n)) for n in counts]


def test_split_is_reproducible():
    # A fixed expectation: if the split changed with a version, scores of different hold-out sets would be mixed.
    held = split_holdout(part([n % 3 for n in range(30)]), 2, seed=0)[1]
    assert held == (2, 6, 13, 14, 16, 18)
    assert split_holdout(part([n % 3 for n in range(30)]), 2, seed=1)[1] != held


def test_split_of_a_class_does_not_depend_on_other_classes():
    """The hold-out set of ImageNet-100 is the part of ImageNet's in its classes."""
    keys = [f"c{n % 4}/{n:03}.png" for n in range(80)]
    held = {keys[i] for i in split_holdout(part([n % 4 for n in range(80)], keys=keys), 5, 0)[1]}
    fewer = [key for key in reversed(keys) if key[:2] in ("c1", "c3")]
    found = part([0 if key[:2] == "c3" else 1 for key in fewer], keys=fewer)
    assert {fewer[i] for i in split_holdout(found, 5, 0)[1]} == {key for key in held if key[:2] in ("c1", "c3")}


def test_all_classes_that_are_too_small_are_listed():
    with pytest.raises(DataError) as error:
        split_holdout(part([0] * 9 + [1] * 2 + [2] * 3), 3, 0)
    assert str(error.value) == (
        "here cannot be split with holdout=3:\n  class 'c1' has 2 images, but 3 would be held out\n"
        "  class 'c2' has 3 images, but 3 would be held out\nUse a smaller holdout or other classes: each class needs "
        "at least one image more than is held out."
    )


@pytest.mark.parametrize("holdout", [0, 3, 0.1])
def test_all_classes_without_images_are_listed(holdout):
    """Also with holdout=0, which loaders have."""
    with pytest.raises(DataError) as error:
        split_holdout(part([1] * 9 + [3] * 2, classes=5), holdout, 0)
    assert str(error.value) == (
        "here has no images of 3 of its 5 classes:\n  c0\n  c2\n  c4\nAdd images of these classes, or renumber the "
        "labels: they count from 0 to 4."
    )


@pytest.mark.parametrize("holdout", [1.0, 0.0, -1, 1.5, True, "0.1", None, float("nan")])
def test_wrong_holdout_is_refused(holdout):
    with pytest.raises(InvalidValue, match=r"holdout must be a share of each class between 0 and 1, such as 0\.1, or"):
        check_holdout(holdout)
