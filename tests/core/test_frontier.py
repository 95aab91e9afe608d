from __future__ import annotations

import dataclasses
import re
from itertools import pairwise

import numpy as np
import pytest

from depthfold.core import Budget, Drops, Frontier, MeasuredSpeedup, Network, Plan, Segment, SolvedPlan, Span, plan_of
from depthfold.errors import BudgetError, InvalidValue, PlanError
from depthfold.solver import solve
from depthfold.support.document import decode
from structures import plain_chain
from tables import importance_table, latency_table

# Three layers. Merging (1, 3] saves 2 ms and costs 0.5; merging all saves 1 ms more and costs 2.
TIMES = {(0, 1): 4.0, (1, 2): 3.0, (2, 3): 3.0, (0, 2): 9.0, (1, 3): 4.0, (0, 3): 7.0}
IMPORTANCES = {(0, 1): 0.0, (1, 2): 0.0, (2, 3): 0.0, (0, 2): -1.0, (1, 3): -0.5, (0, 3): -2.0}


def frontier(network: Network | None = None, original: float | None = None) -> Frontier:
    values = {(i, j, 1, 1): value for (i, j), value in IMPORTANCES.items()}
    solved = solve(latency_table(TIMES, network="net"), importance_table(values), network=network)
    return dataclasses.replace(solved, original=original or solved.original)


def test_plans_are_sorted_by_latency_and_importance() -> None:
    plans = frontier().plans
    assert [(plan.latency, plan.importance) for plan in plans] == [(7.0, -2.0), (8.0, -0.5), (10.0, 0.0)]
    assert [plan.plan for plan in plans] == [Plan({3}, ()), Plan({1, 3}, (1,)), Plan({1, 2, 3}, (1, 2))]
    assert list(frontier()) == list(plans)
    assert (len(frontier()), frontier()[1], frontier()[-1]) == (3, plans[1], plans[2])


@pytest.mark.parametrize(
    ("budget", "latency"),
    [
        ("7ms", 7.0),
        ("7.99ms", 7.0),
        ("8 ms", 8.0),
        ("80%", 8.0),
        ("79.9%", 7.0),
        (Budget.share(0.7), 7.0),
        ("1.25x", 8.0),
        (Budget.speedup(1.0), 10.0),
        ("1e9ms", 10.0),
    ],
)
def test_at_returns_the_best_plan_within_the_budget(budget: Budget | str, latency: float) -> None:
    assert frontier().at(budget).latency == latency


def test_a_number_without_a_unit_is_refused() -> None:
    """60 may be meant in per cent: as milliseconds it would return the original in silence."""
    for number in (0.6, 60):
        with pytest.raises(BudgetError, match=f"The budget {number} is not a number with a unit"):
            frontier().at(number)


def test_budget_below_the_fastest_plan_names_its_latency() -> None:
    message = r"No plan meets the budget 6\.9 ms: the fastest plan takes 7\.0 ms \(70\.0% of the original\)"
    with pytest.raises(BudgetError, match=message):
        frontier().at("6.9ms")
    with pytest.raises(BudgetError, match=r"No plan meets the budget 2x \(5 ms\)"):
        frontier().at("2x")


def test_share_in_the_message_is_accepted_as_budget() -> None:
    """A share that is printed to the nearest tenth may be just below what the plan takes."""
    for original in (10.0, 9.1, 7.0, 9.999, 3.0, 1e4, 1e9):
        with pytest.raises(BudgetError, match="No plan meets the budget") as caught:
            frontier(original=original).at("1e-9ms")
        share = re.search(r"\(([\d.]+%) of the original\)", str(caught.value))
        assert share is not None
        assert frontier(original=original).at(share[1]).latency >= 7.0
    with pytest.raises(BudgetError, match=r"the fastest plan takes 7\.0 ms\. Ask"):  # 1400% is too large for a budget
        frontier(original=0.5).at("1ms")


def test_share_in_the_message_is_not_rounded_up_if_it_is_exact() -> None:
    for tenths in range(7, 5000):
        with pytest.raises(BudgetError, match=rf"\({tenths // 10}\.{tenths % 10}% of the original\)"):
            frontier(original=7.0 * 1000 / tenths).at("1e-9ms")


def test_plan_of_no_time_meets_every_budget() -> None:
    solved = solve(latency_table({(0, 1): 0.0}), importance_table({(0, 1, 1, 1): 0.0}))
    assert [solved.at(budget).latency for budget in ("5e-324ms", "0.1%", "1000x")] == [0.0] * 3
    assert "0   ?" in str(solved)


def test_shares_refer_to_the_original() -> None:
    assert frontier(original=20.0).at("40%").latency == 8.0
    with pytest.raises(BudgetError, match="the fastest plan takes"):
        frontier(original=5.0).at("60%")


def test_solved_plan_prints_its_segments() -> None:
    plan = frontier(plain_chain(3)).at("8ms")
    assert plan_of(plan) is plan.plan
    assert plan.plan == Plan(activations={1, 3}, cuts=(1,))
    assert (plan.boundaries, plan.latency, plan.importance, plan.speedup) == ((1,), 8.0, -0.5, 1.25)
    merged = plan.segments[1]
    assert (merged.span, merged.times, merged.replaced) == (Span(1, 3), (4.0, 4.0), 6.0)
    assert merged.shape is not None and merged.shape.kernel == (5, 5)
    assert str(plan).splitlines() == [
        "predicted: 8 ms, 80.0% of the original's 10 ms (1.25x as fast); importance -0.5",
        "Plan: activations at 1 3; cuts at 1; boundaries at 1",
        "2 convolutions; 8 ms if merging followed A, not S",
        "",
        "layers  becomes      ms  replaces ms  saves ms",
        "------  -----------  --  -----------  --------",
        "1       3x3, 8 -> 8  4   4            0",
        "2-3     5x5, 8 -> 8  4   6            2",
    ]


def test_plan_that_was_timed_prints_what_was_measured_before_what_was_predicted() -> None:
    predicted = frontier(plain_chain(3)).at("8ms")
    quiet = MeasuredSpeedup(original=(11.9, 12.0, 12.1), network=(9.2, 9.3, 9.4))
    timed = dataclasses.replace(predicted, measured=quiet)
    first, *others = str(timed).splitlines()
    assert first == "measured end to end: 9.3 ms, 77.5% of the original's 12 ms (1.29x as fast)"
    assert others == str(predicted).splitlines()
    assert SolvedPlan.loads(timed.dumps()).measured == quiet
    assert timed == predicted  # times are not repeatable
    assert "measured" not in predicted.to_json()
    loaded = dataclasses.replace(quiet, network=(5.0, 9.3, 9.4))
    first, second, *others = str(dataclasses.replace(predicted, measured=loaded)).splitlines()
    assert first.endswith("(1.29x as fast, unreliable)")
    assert second == "unreliable: the compressed network took 5 to 9.4 ms; something else was probably running"
    assert others == str(predicted).splitlines()


def test_segment_has_no_shape_without_the_network() -> None:
    assert [segment.row(True)[1] for segment in frontier().at("8ms").segments] == ["as it is", "one convolution"]


def test_str_is_a_table() -> None:
    assert str(frontier()).splitlines() == [
        "Frontier of net: 3 plans, exact",
        "environment: not stated",
        "",
        "ms  of original  speed-up  importance  activations  convolutions  ms by A",
        "--  -----------  --------  ----------  -----------  ------------  -------",
        "7   70.0%        1.43x     -2          1            1             7",
        "8   80.0%        1.25x     -0.5        2            2             8",
        "10  100.0%       1.00x     0           3            3             10",
    ]


def test_str_of_a_long_frontier_has_rows_from_its_whole_length() -> None:
    times = {(l - 1, l): 2.0 for l in range(1, 62)} | {(l - 1, l + 1): 3.0 for l in range(1, 61)}
    values = {(i, j, 1, 1): 1.0 for i, j in times}
    solved = solve(latency_table(times), importance_table(values))
    assert len(solved) == 31
    lines = str(solved).splitlines()
    assert lines[0] == "Frontier of an unnamed network: 31 plans, exact; 20 of them:"
    shown = [float(line.split()[0]) for line in lines[5:]]
    plans = [point.latency for point in solved.points]
    rows = [plans.index(latency) for latency in shown]
    assert (len(rows), rows[0], rows[-1]) == (20, 0, 30)
    assert {after - before for before, after in pairwise(rows)} == {1, 2}


def test_counts_are_singular_or_plural() -> None:
    one = solve(latency_table({(0, 1): 1.0}), importance_table({(0, 1, 1, 1): 0.0}))
    assert "1 plan, exact" in str(one)
    assert "1 convolution; 1 ms if" in str(one[0])
    assert repr(one) == "<Frontier (unnamed): 1 plan, 1 to 1 ms, exact>"
    assert repr(frontier()) == "<Frontier net: 3 plans, 7 to 10 ms, exact>"
    plan = "<SolvedPlan 1 convolution, 7 ms predicted, importance -2; Plan: activations at 3; cuts at none>"
    assert repr(frontier()[0]) == plan


def test_plans_remember_their_network() -> None:
    solved = frontier(plain_chain(3))
    assert solved.fingerprint == solved[0].fingerprint == plain_chain(3).fingerprint
    data = solved.to_json()
    del data["fingerprint"]
    assert Frontier.from_json(data).fingerprint == ""


def test_plans_are_indexed_and_sliced() -> None:
    assert frontier()[np.int64(1)] == frontier()[1]
    assert frontier()[0:2] == frontier().plans[:2]
    assert frontier()[::-1] == frontier().plans[::-1]
    with pytest.raises(IndexError):
        frontier()[3]


def test_plan_of_takes_plans_and_solved_plans() -> None:
    plan = Plan({1}, (1,))
    assert plan_of(plan) is plan
    assert plan_of(solved_plan(plan=plan)) is plan
    with pytest.raises(PlanError, match=r"Expected a plan, found NoneType\. Give a Plan\(activations, cuts\), or"):
        plan_of(None)  # type: ignore[arg-type]


def test_document_without_the_segments_of_its_plans_is_refused() -> None:
    data = frontier().to_json()
    data["segments"] = [each for each in data["segments"] if each["span"] != {"i": 1, "j": 3}]
    message = r"The plan with the cuts \[1\] needs the segment \(1, 3\], which the frontier lacks\. .* Solve again"
    with pytest.raises(InvalidValue, match=message):
        Frontier.from_json(data)
    solved = frontier()
    with pytest.raises(InvalidValue, match=r"needs the segment \(0, 3\]"):
        dataclasses.replace(solved, segments=()).at("7ms")


def test_lists_are_accepted() -> None:
    solved = frontier()
    taken = dataclasses.replace(solved, points=list(solved.points), segments=list(solved.segments))
    assert taken == solved
    assert hash(taken) == hash(solved)


def test_survives_json() -> None:
    for network in (None, plain_chain(3)):
        solved = frontier(network)
        again = Frontier.loads(solved.dumps())
        assert again == solved
        assert again.at("80%") == solved.at("80%")
        assert SolvedPlan.loads(solved[1].dumps()) == solved[1]


def test_document_of_an_older_version_is_read() -> None:
    """It has fields that are no longer used, also inside another document."""
    old = frontier().to_json() | {"normalisation": "single", "lost": 0.0}
    assert Frontier.from_json(old) == frontier()
    del old["format"], old["version"]
    assert decode(Frontier, old, "Findings.frontier") == frontier()


def test_plans_in_the_wrong_order_are_refused() -> None:
    solved = frontier()
    with pytest.raises(InvalidValue, match="rise in latency and importance, found 10 ms with 0 before 7 ms with -2"):
        dataclasses.replace(solved, points=(solved.points[2], solved.points[0]))
    with pytest.raises(InvalidValue, match="at least one plan"):
        dataclasses.replace(solved, points=())


def solved_plan(**changes: object) -> SolvedPlan:
    segments = (Segment(span=Span(0, 1), times=(1.0, 1.0)), Segment(span=Span(1, 3), times=(1.0, 1.0)))
    fields: dict[str, object] = {
        "plan": Plan({1}, (1,)),
        "boundaries": (1,),
        "latency": 2.0,
        "importance": 0.0,
        "latency_by_activations": 2.0,
        "segments": segments,
        "original": None,
    }
    return SolvedPlan(**fields | changes)


def test_A_must_be_a_subset_of_S() -> None:
    with pytest.raises(PlanError, match=r"The activations \[1, 2\] are not among the cuts \[\]"):
        Plan(activations={1, 2}, cuts=())
    with pytest.raises(PlanError, match=r"The activations \[2\] are not among the cuts \[1, 3\]"):
        solved_plan(plan=Plan({1, 2}, (1, 3)))


@pytest.mark.parametrize(
    "change",
    [
        {"plan": Plan({1}, (1, 2))},
        {"plan": Plan({1}, (1,), Drops([2]))},
        {"segments": (Segment(span=Span(0, 1), times=(1.0, 1.0)), Segment(span=Span(2, 3), times=(1.0, 1.0)))},
        {"segments": (Segment(span=Span(0, 2), times=(1.0, 1.0)), Segment(span=Span(1, 3), times=(1.0, 1.0)))},
        {"segments": ()},
    ],
)
def test_segments_of_another_plan_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(PlanError, match=r"do not fit its cuts and what it drops\. To change it, make a Plan"):
        solved_plan(**change)


def test_plan_without_a_known_original_prints() -> None:
    assert str(solved_plan()).startswith("predicted: 2 ms; importance 0\n")
    assert solved_plan().speedup is None
