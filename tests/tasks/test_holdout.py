"""The hold-out: apart from the training part, the same everywhere, and class by class."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from depthfold.errors import DataError, InvalidValue
from depthfold.tasks.collection import Collection, check_holdout, split_off
from depthfold.tasks.pictures import Held


def collection(y, classes=None, keys=None):
    classes = classes or max(y) + 1
    return Collection(
        where="here",
        classes=tuple(f"c{n}" for n in range(classes)),
        labels=torch.tensor(y),
        keys=keys or range(len(y)),
        pictures=Held(pixels=torch.zeros(len(y), 1, 1, 1, dtype=torch.uint8)),
    )


@given(
    counts=st.lists(st.integers(2, 40), min_size=1, max_size=6),
    holdout=st.sampled_from([0, 1, 0.1, 0.4]),
    seed=st.integers(0, 5),
)
def test_every_image_is_on_one_side_and_every_class_on_both(counts, holdout, seed):
    y = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts)).tolist()
    kept, held = split_off(collection(y), holdout, seed)
    assert sorted(kept + held) == list(range(len(y)))
    assert not {*kept} & {*held}
    of_class = np.bincount([y[i] for i in held], minlength=len(counts)).tolist()
    assert of_class == [holdout if isinstance(holdout, int) else max(1, round(holdout * n)) for n in counts]


def test_the_same_on_every_machine():
    # Written down once: a choice that changes with the version of anything would mix scores of different hold-outs.
    held = split_off(collection([n % 3 for n in range(30)]), 2, seed=0)[1]
    assert held == (2, 6, 13, 14, 16, 18)
    assert split_off(collection([n % 3 for n in range(30)]), 2, seed=1)[1] != held


def test_other_classes_and_other_images_do_not_matter():
    """So the hold-out of ImageNet-100 is the part of ImageNet's that lies in its classes."""
    keys = [f"c{n % 4}/{n:03}.png" for n in range(80)]
    held = {keys[i] for i in split_off(collection([n % 4 for n in range(80)], keys=keys), 5, 0)[1]}
    fewer = [key for key in reversed(keys) if key[:2] in ("c1", "c3")]
    found = collection([0 if key[:2] == "c3" else 1 for key in fewer], keys=fewer)
    assert {fewer[i] for i in split_off(found, 5, 0)[1]} == {key for key in held if key[:2] in ("c1", "c3")}


def test_all_classes_that_are_too_small_are_named_together():
    with pytest.raises(DataError) as error:
        split_off(collection([0] * 9 + [1] * 2 + [3] * 3, classes=4), 3, 0)
    assert str(error.value) == (
        "here cannot be split with holdout=3:\n  class 'c1' has 2 images, and 3 would be held out\n"
        "  class 'c2' has no image\n  class 'c3' has 3 images, and 3 would be held out\nEvery class needs at least one "
        "image more than is held out. Give a smaller holdout, or other classes."
    )


@pytest.mark.parametrize("holdout", [1.0, 0.0, -1, 1.5, True, "0.1", None, float("nan")])
def test_what_is_no_holdout(holdout):
    with pytest.raises(InvalidValue, match=r"holdout must be a share of each class between 0 and 1, such as 0\.1, or"):
        check_holdout(holdout)
