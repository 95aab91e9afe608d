"""Plans and their checks."""

import numpy as np
import pytest

from depthfold.core import Drops, Plan, Segment, Span
from depthfold.errors import DepthfoldError, PlanError
from depthfold.support.digest import digest


def test_plan_accepts_iterables_and_sorts_them():
    plan = Plan(activations=[4, 2], cuts=(4, 2, 3, 3))
    assert plan.activations == frozenset({2, 4})
    assert plan.cuts == (2, 3, 4)
    assert plan == Plan(activations=frozenset({2, 4}), cuts=iter([2, 3, 4]))
    assert hash(plan) == hash(Plan((2, 4), (2, 3, 4)))


def test_plan_prints_runs_of_positions():
    assert str(Plan((1, 2, 3, 7), (1, 2, 3, 5, 7))) == "Plan: activations at 1-3 7; cuts at 1-3 5 7"
    assert str(Plan((), ())) == "Plan: activations at none; cuts at none"


@pytest.mark.parametrize("bad", [0, -1])
def test_positions_start_at_1(bad):
    message = "A position in the {} of a plan must be an integer of at least 1, found {}."
    with pytest.raises(PlanError, match=message.format("cuts", bad)):
        Plan((), (bad,))
    with pytest.raises(PlanError, match=message.format("activations", bad)):
        Plan((bad,), ())


@pytest.mark.parametrize("bad", [(1.0,), ("2",), (None,), ([1],), (True,), 1, None, "1"])
def test_positions_are_sequences_of_integers(bad):
    with pytest.raises(PlanError, match=r"cuts of a plan must be (an integer of at least 1|a sequence), found "):
        Plan((), bad)
    with pytest.raises(PlanError, match=r"activations of a plan must be (an integer of at least 1|a sequence), found "):
        Plan(bad, ())


def test_positions_may_be_numbers_of_numpy():
    assert Plan(np.array([2, 4]), np.array([2, 4])) == Plan((2, 4), (2, 4))


def test_activations_must_be_cuts_except_at_the_last_position():
    assert Plan((9,), (3,)).activations == {9}
    with pytest.raises(PlanError, match=r"The activations \[2\] are not among the cuts \[3\]\. .*add them to cuts"):
        Plan((2,), (3,))
    with pytest.raises(PlanError, match=r"The activations \[4, 5\] are not among the cuts \[3\]"):
        Plan((4, 5), (3,))


def test_identity_of_a_plan_without_drops_is_that_of_older_runs():
    plan = Plan((4, 2), (2, 3, 4))
    assert digest(*plan.digest_parts) == digest([2, 4], [2, 3, 4])
    others = [Plan((4, 2), (2, 3, 4), dropped) for dropped in (Drops([1]), Drops([1, 6]), Drops([], [(4, 6)]))]
    assert len({digest(*each.digest_parts) for each in (plan, *others)}) == 4


def test_plan_is_frozen():
    with pytest.raises(AttributeError):
        Plan((), ()).cuts = (1,)


def test_plan_errors_are_errors_of_depthfold_and_value_errors():
    assert issubclass(PlanError, DepthfoldError)
    assert issubclass(PlanError, ValueError)


def test_layer_alone_saves_no_fraction_of_a_picosecond():
    rounded = Segment(span=Span(0, 1), times=(0.5, 1.25), replaced=1.2500000004)
    assert rounded.row(active=True)[2:] == ("1.25", "1.25", "0")
    assert rounded.row(active=False)[2:] == ("0.5", "1.25", "0.75")
