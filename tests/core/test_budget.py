from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from depthfold.core import Budget
from depthfold.errors import BudgetError


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (12, Budget.milliseconds(12)),
        (12.5, Budget.milliseconds(12.5)),
        ("12", Budget.milliseconds(12)),
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
        (Decimal("12.5"), Budget.milliseconds(12.5)),
        (Fraction(25, 2), Budget.milliseconds(12.5)),
        (np.float32(12.5), Budget.milliseconds(12.5)),
        (np.int64(12), Budget.milliseconds(12)),
        ("1000%", Budget.share(10)),
        (Budget.speedup(1.6), Budget.speedup(1.6)),
    ],
)
def test_reads_what_a_person_writes(written: object, meant: Budget) -> None:
    assert Budget.parse(written) == meant


@pytest.mark.parametrize(
    "written", ["", "fast", "12s", "1,5x", "%", "x", "12 ms ms", "60%x", None, True, [12], "sNaN%"]
)
def test_refuses_what_cannot_be_read(written: object) -> None:
    with pytest.raises(BudgetError, match=r"cannot be read\. Readable are 12\.5 \(milliseconds\)"):
        Budget.parse(written)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (0, "The budget is zero"),
        ("0%", "The budget is zero"),
        ("1e-999ms", "The budget is zero"),
        (-3.0, r"The budget is negative \(-3\)"),
        ("-60 %", r"The budget is negative \(-0\.6\)"),
        (math.nan, "The budget is NaN"),
        ("nan ms", "The budget is NaN"),
        (math.inf, "The budget is infinite"),
        (10**400, "The budget is infinite"),
        (-(10**400), "The budget is infinite"),
        (Decimal("sNaN"), "The budget is NaN"),
        (Budget.share, r"The budget .* cannot be read"),
        ("6000%", r"60 times the original's latency; .* Did you mean 0\.6\?"),
    ],
)
def test_refuses_what_makes_no_sense(written: object, message: str) -> None:
    with pytest.raises(BudgetError, match=message):
        Budget.parse(written)


def test_refuses_a_kind_that_does_not_exist() -> None:
    with pytest.raises(BudgetError, match="milliseconds, a share or a speedup, found 'hours'"):
        Budget("hours", 1)


def test_limits_are_exact() -> None:
    assert Budget.share(0.6).limit(10.0) == 6  # and not 0.6 in binary, which is a little less
    assert Budget.speedup(1.6).limit(8.0) == 5
    assert Budget.milliseconds(0.1).limit(None) == Fraction(0.1)


def test_a_share_needs_the_original() -> None:
    with pytest.raises(BudgetError, match="60% needs the latency of the original"):
        Budget.share(0.6).limit(None)


@pytest.mark.parametrize("text", ["12.5 ms", "60%", "1.5x"])
def test_prints_what_it_reads(text: str) -> None:
    assert str(Budget.parse(text)) == text


def test_per_cent_where_a_share_is_expected() -> None:
    with pytest.raises(BudgetError, match=r"at most 10\. Did you mean 0\.6\?"):
        Budget.share(60)
    assert Budget.share(1.2).value == 1.2
    assert Budget.speedup(60).value == 60


def test_survives_json() -> None:
    for budget in (Budget.share(Decimal("0.6")), Budget.milliseconds(12), Budget.speedup(1.6)):
        assert type(budget.value) is float
        assert Budget.loads(budget.dumps()) == budget
    with pytest.raises(BudgetError, match="The budget is zero"):
        Budget.from_json({"format": "depthfold.budget", "version": 1, "kind": "share", "value": 0})
