"""The arguments of Drops."""

import numpy as np
import pytest

from depthfold.core import Drops, Plan, Span
from depthfold.errors import PlanError


def test_branches_may_be_pairs() -> None:
    dropped = Drops(branches=[(3, 5), Span(1, 3), (1, 3)])
    assert dropped == Drops(branches=[Span(1, 3), Span(3, 5)])
    assert dropped.missing == {2, 3, 4, 5}


def test_numbers_of_numpy_are_integers() -> None:
    dropped = Drops(np.array([3, 2]), np.array([[4, 6]]))
    assert dropped == Drops([2, 3], [Span(4, 6)])
    assert {type(n) for n in (*dropped.layers, dropped.branches[0].i)} == {int}


@pytest.mark.parametrize("wrong", ["2", 2.0, 0, -1, None, Span(1, 2)])
def test_layers_are_integers_from_1(wrong: object) -> None:
    with pytest.raises(PlanError, match=r"number of a dropped layer must be an integer of at least 1, found"):
        Drops(layers=[2, wrong])  # type: ignore[list-item]


@pytest.mark.parametrize("wrong", [3, "13", (3, 1), (1.0, 3), (1, 2, 3), ("1", "3"), None])
def test_branches_are_spans(wrong: object) -> None:
    with pytest.raises(PlanError, match=r"Expected a list of layers .* Drops\(\[3, 5\], \[\(6, 9\)\]\), found 2 and"):
        Drops(2)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"dropped branch must be a span .*, found 1\. Give a list of them"):
        Drops([2], (1, 3))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"dropped branch must be a span with 0 <= i < j, such as Span\(3, 6\), found"):
        Drops(branches=[wrong])  # type: ignore[list-item]


@pytest.mark.parametrize("wrong", [[2], 2, None, {"layers": [2]}])
def test_plan_refuses_drops_of_another_type(wrong: object) -> None:
    with pytest.raises(PlanError, match=r"must be Drops, found .*\. Use, for example, dropped=Drops\(layers=\[2\]\)"):
        Plan((), (), wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dropped", "key"),
    [
        (Drops(), ""),
        (Drops([5, 3]), "3 5"),
        (Drops([], [(6, 9)]), "6:9"),
        (Drops([12], [(6, 9), (1, 3)]), "12 1:3 6:9"),
    ],
)
def test_key_is_read_back(dropped: Drops, key: str) -> None:
    assert dropped.key == key
    assert Drops.parse(key) == dropped
