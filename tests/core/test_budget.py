from __future__ import annotations

import math
import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthfold.core import Budget
from depthfold.errors import BudgetError


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("12ms", Budget.milliseconds(12)),
        (" 12.5 ms ", Budget.milliseconds(12.5)),
        ("1e1ms", Budget.milliseconds(10)),
        ("60%", Budget.share(0.6)),
        ("60 %", Budget.share(0.6)),
        ("33.3%", Budget.share(0.333)),
        ("1.5x", Budget.speedup(1.5)),
        ("1.5 X", Budget.speedup(1.5)),
        ("12 MS", Budget.milliseconds(12)),
        ("12Ms", Budget.milliseconds(12)),
        ("1000%", Budget.share(10)),
        (Budget.speedup(1.6), Budget.speedup(1.6)),
    ],
)
def test_parse_reads_every_form(written: object, meant: Budget) -> None:
    assert Budget.parse(written) == meant


@pytest.mark.parametrize("written", ["", "fast", "12", "0.6", "12s", "1,5x", "%", "x", "12 ms ms", "60%x", "sNaN%"])
def test_text_that_is_not_a_number_with_a_unit_is_refused(written: str) -> None:
    with pytest.raises(BudgetError, match="is not a number with a unit"):
        Budget.parse(written)


@pytest.mark.parametrize("written", [60, 0.6, 0, Decimal("12.5"), np.float32(12.5), None, True, [12], Budget.share])
def test_a_number_without_a_unit_is_refused_and_the_units_are_shown(written: object) -> None:
    message = (
        f'The budget {written!r:.80} is not a number with a unit. Write "12.5ms", "60%" of the original\'s latency, '
    )
    with pytest.raises(BudgetError, match=re.escape(message + 'or "1.5x" as fast.')):
        Budget.parse(written)


@pytest.mark.parametrize("value", [Decimal("12.5"), Fraction(25, 2), np.float32(12.5), 12.5])
def test_any_real_number_with_its_kind_is_a_budget(value: float) -> None:
    assert Budget.milliseconds(value) == Budget.parse("12.5ms")
    for wrong in (None, True, "12", [12]):
        with pytest.raises(BudgetError, match="The value of a budget must be a number, found"):
            Budget.milliseconds(wrong)


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("0ms", "0 as milliseconds"),
        ("0%", "0 as share"),
        ("1e-999ms", "0 as milliseconds"),
        ("-3ms", "-3 as milliseconds"),
        ("-60 %", r"-0\.6 as share"),
        ("nan ms", "nan as milliseconds"),
        ("1e999ms", "inf as milliseconds"),
        ("6000%", r"60 as share\. Did you mean 0\.6\?"),
    ],
)
def test_budget_must_be_positive_and_finite(written: object, found: str) -> None:
    with pytest.raises(BudgetError, match=f"A budget must be positive and finite, .* at most 10; found {found}"):
        Budget.parse(written)


@pytest.mark.parametrize("value", [0, math.nan, math.inf, 10**400, -(10**400), Decimal("sNaN")])
def test_value_must_be_positive_and_finite(value: float) -> None:
    for make in (Budget.milliseconds, Budget.share, Budget.speedup):
        with pytest.raises(BudgetError, match="A budget must be positive and finite"):
            make(value)


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(BudgetError, match="milliseconds, a share or a speedup, found 'hours'"):
        Budget("hours", 1)


def admitted(budget: Budget, original: float) -> float:
    """The latency of the slowest plan that meets the budget. Those of plans are whole picoseconds."""
    return math.floor(Fraction(budget.limit(original)) * 10**9) / 10**9


def test_shares_and_speedups_count_as_written() -> None:
    """Not as the binary fractions closest to them: 0.57 * 100.0 is less than 57."""
    assert admitted(Budget.share(0.6), 10.0) == 6
    assert admitted(Budget.share(0.57), 100.0) == 57 > 0.57 * 100.0
    assert admitted(Budget.speedup(1.6), 8.0) == 5
    assert admitted(Budget.share(0.333), 1.0) == 0.333
    assert admitted(Budget.share(0.333), 1.000000001) == 0.333
    assert admitted(Budget.speedup(3.0), 1.0) == 0.333333333
    assert admitted(Budget.speedup(1.5), 1.0) == 0.666666666
    assert admitted(Budget.share(0.4), 1e-9) == 0
    assert Budget.milliseconds(0.1).limit(None) == 0.1
    for value in (1e-300, 1e-13, 1e300):
        assert Budget.speedup(value).limit(1.0) >= 0


@given(st.integers(1, 10**11), st.integers(1, 10**11))
def test_share_and_speedup_of_a_plan_admit_the_plan(one: int, other: int) -> None:
    latency, original = min(one, other) / 1e9, max(one, other) / 1e9
    for budget in (Budget.share(latency / original), Budget.speedup(original / latency)):
        assert latency <= budget.limit(original) < latency + 1e-9  # and no plan that takes a picosecond more


@given(st.integers(1, 10**15), st.floats(1e-6, 10.0))
def test_budget_is_exceeded_by_no_more_than_rounding(ps: int, value: float) -> None:
    original = ps / 1e9
    for budget, exact in (
        (Budget.share(value), Fraction(original) * Fraction(value)),
        (Budget.speedup(value), Fraction(original) / Fraction(value)),
    ):
        assert exact <= Fraction(budget.limit(original)) <= exact * (1 + Fraction(2, 10**12))


def test_share_needs_the_original() -> None:
    with pytest.raises(BudgetError, match="60% needs the latency of the original"):
        Budget.share(0.6).limit(None)


@pytest.mark.parametrize("text", ["12.5 ms", "60%", "1.5x"])
def test_str_can_be_parsed_again(text: str) -> None:
    assert str(Budget.parse(text)) == text


def test_per_cent_as_a_share_is_refused() -> None:
    with pytest.raises(BudgetError, match=r"at most 10; found 60 as share\. Did you mean 0\.6\?"):
        Budget.share(60)
    assert Budget.share(1.2).value == 1.2
    assert Budget.speedup(60).value == 60


def test_survives_json() -> None:
    for budget in (Budget.share(Decimal("0.6")), Budget.milliseconds(12), Budget.speedup(1.6)):
        assert type(budget.value) is float
        assert Budget.loads(budget.dumps()) == budget
    with pytest.raises(BudgetError, match="A budget must be positive"):
        Budget.from_json({"format": "depthfold.budget", "version": 1, "kind": "share", "value": 0})
