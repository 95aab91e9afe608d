"""The hold-out: a part of the training set, fixed for good, that importances are scored on.

Within a class the images are put in the order of a digest of their names, and the first so many are held out. So the
choice is the same on every machine and in every version, an image that is added or taken away changes at most one
other, and a dataset of fewer classes has the hold-out of those classes.
"""

from __future__ import annotations

from depthfold.core.wording import count
from depthfold.errors import DataError, InvalidValue
from depthfold.training.data.collection import Collection, listed
from depthfold.training.task import mix


def check_holdout(holdout: float | int) -> None:
    """A share of each class between 0 and 1, or a whole number of images of each class."""
    is_share = isinstance(holdout, float) and 0.0 < holdout < 1.0
    is_number = isinstance(holdout, int) and not isinstance(holdout, bool) and holdout >= 0
    if not (is_share or is_number):
        raise InvalidValue(
            f"holdout must be a share of each class between 0 and 1, such as 0.1, or a whole number of images of each "
            f"class, such as 50 (0: none), found {holdout!r}."
        )


def split_off(collection: Collection, holdout: float | int, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The indices to train on, and those held out: of every class the same share, or the same number."""
    members: list[list[int]] = [[] for _ in collection.classes]
    for index, label in enumerate(collection.labels.tolist()):
        members[label].append(index)
    kept: list[int] = []
    held: list[int] = []
    problems: list[str] = []
    for name, indices in zip(collection.classes, members, strict=True):
        number = holdout if isinstance(holdout, int) else max(1, round(holdout * len(indices)))
        if not indices:
            problems.append(f"class {name!r} has no image")
        elif number >= len(indices):
            problems.append(f"class {name!r} has {count(len(indices), 'image')}, and {number} would be held out")
        if number:
            indices = sorted(indices, key=lambda index: (mix(seed, "holdout", collection.keys[index]), index))
        held += indices[:number]
        kept += indices[number:]
    if problems:
        raise DataError(
            f"{collection.where} cannot be split with holdout={holdout}:{listed(problems)}\nEvery class needs at least "
            "one image more than is held out. Give a smaller holdout, or other classes."
        )
    return tuple(sorted(kept)), tuple(sorted(held))
