"""Plans: pure data, and what they refuse."""

import pytest

from depthfold.core import Plan
from depthfold.errors import DepthfoldError, PlanError


def test_a_plan_takes_any_iterables_and_holds_them_in_order():
    plan = Plan(activations=[4, 2], cuts=(4, 2, 3, 3))
    assert plan.activations == frozenset({2, 4})
    assert plan.cuts == (2, 3, 4)
    assert plan == Plan(activations=frozenset({2, 4}), cuts=iter([2, 3, 4]))
    assert hash(plan) == hash(Plan((2, 4), (2, 3, 4)))


def test_a_plan_prints_runs_of_positions():
    assert str(Plan((1, 2, 3, 7), (1, 2, 3, 5, 7))) == "Plan: activations at 1-3 7; cuts at 1-3 5 7"
    assert str(Plan((), ())) == "Plan: activations at none; cuts at none"


@pytest.mark.parametrize("bad", [0, -1, 1.0, "2", True, None])
def test_positions_are_integers_from_1(bad):
    with pytest.raises(PlanError, match=r"A plan's cuts are positions 1, 2, ..., found"):
        Plan((), (bad,))
    with pytest.raises(PlanError, match=r"A plan's activations are positions 1, 2, ..., found"):
        Plan((bad,), ())


@pytest.mark.parametrize("bad", [1, None, "12"])
def test_positions_come_several_in_a_row(bad):
    with pytest.raises(
        PlanError, match=rf"^A plan's activations .*, found {bad!r}\. Write Plan\(\[2\], \[1, 2\]\), say"
    ):
        Plan(bad, [1])
    with pytest.raises(PlanError, match=rf"^A plan's cuts are several positions in a row, found {bad!r}\. Write Plan"):
        Plan([1], bad)


def test_a_position_that_cannot_be_hashed_is_none():
    with pytest.raises(PlanError, match=r"A plan's activations are positions 1, 2, ..., found \[1\]"):
        Plan([[1]], [1])


def test_activations_are_cuts_but_for_the_one_at_the_last_position():
    assert Plan((9,), (3,)).activations == {9}
    with pytest.raises(PlanError, match=r"The activations \[2\] are not among the cuts \[3\]\. .*add them to cuts"):
        Plan((2,), (3,))
    with pytest.raises(PlanError, match=r"The activations \[4, 5\] are not among the cuts \[3\]"):
        Plan((4, 5), (3,))


def test_a_plan_is_frozen():
    with pytest.raises(AttributeError):
        Plan((), ()).cuts = (1,)


def test_plan_errors_are_errors_of_depthfold_and_value_errors():
    assert issubclass(PlanError, DepthfoldError)
    assert issubclass(PlanError, ValueError)
